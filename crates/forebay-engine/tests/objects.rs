//! Tests loads from object stores and HTTP servers that fail on purpose: the bytes are right, little else is read, and
//! errors say what is wrong.
#![cfg(feature = "objects")]

#[path = "support/loaded.rs"]
mod loaded;
#[path = "support/server.rs"]
mod server;
mod support;

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_engine::load::LoadError;
use forebay_engine::load::{
    Choice, ChosenRequest, DimensionSlice, LoadedTensor, Next, StreamOrder, TensorStream,
    load_chosen,
};
use forebay_engine::pack::{PackOptions, pack};
use forebay_format::{FormatError, WeightsTable};
use forebay_store::{Interrupt, OutputFile, Storage};
use loaded::{bytes, going_on};
use server::{Asked, Behaviour, Fault, Server};
use support::fixtures;

type Options<'a> = &'a [(&'a str, &'a str)];

/// Opens URLs with settings for a server on this machine.
fn open(
    server: &Server,
    urls: &[&str],
    options: Options<'_>,
    interrupt: &Interrupt,
) -> Result<(WeightsTable, ChosenRequest), FormatError> {
    let urls: Vec<PathBuf> = urls.iter().map(PathBuf::from).collect();
    let url = server.url();
    let service: Vec<(&str, String)> = match urls[0].to_str().unwrap().split("://").next() {
        Some("s3") => vec![
            ("aws_endpoint", url),
            ("aws_access_key_id", "me".into()),
            ("aws_secret_access_key", "word".into()),
        ],
        Some("gs") => vec![("google_base_url", url), ("google_skip_signature", "true".into())],
        Some("az") => vec![
            ("azure_endpoint", url),
            ("azure_storage_account_name", "me".into()),
            ("azure_skip_signature", "true".into()),
        ],
        _ => Vec::new(),
    };
    let mut settings: HashMap<String, String> =
        service.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    settings.extend(options.iter().map(|(name, value)| (name.to_string(), value.to_string())));
    let (storage, names) = Storage::of(&urls, settings, interrupt).unwrap();
    let table = WeightsTable::open_in(&storage, &names)?;
    let request =
        ChosenRequest { storage, interrupt: interrupt.clone(), ..ChosenRequest::default() };
    Ok((table, request))
}

fn whole(table: &WeightsTable) -> Vec<Choice> {
    (0..table.tensors().len()).map(|tensor| Choice { tensor, slice: None }).collect()
}

/// Returns a safetensors file of U8 tensors of these sizes, and the bytes of each.
fn file_of(first: usize, sizes: &[usize]) -> (Vec<u8>, Vec<Vec<u8>>) {
    let mut random = fastrand::Rng::with_seed(first as u64 + 1);
    let (mut header, mut data, mut all) = (serde_json::Map::new(), Vec::new(), Vec::new());
    for (index, &size) in sizes.iter().enumerate() {
        let content: Vec<u8> = (0..size).map(|_| random.u8(..)).collect();
        let offsets = [data.len(), data.len() + size];
        let entry = serde_json::json!({"dtype": "U8", "shape": [size], "data_offsets": offsets});
        header.insert(format!("t{:04}", first + index), entry);
        data.extend(&content);
        all.push(content);
    }
    let text = serde_json::to_vec(&header).unwrap();
    let file = [&(text.len() as u64).to_le_bytes()[..], &text, &data].concat();
    (file, all)
}

/// Sizes of small and large tensors in turn, as models have them.
fn sizes(count: usize) -> Vec<usize> {
    (0..count).map(|index| [70_001, 3_000_000, 17, 900_000, 0, 5_500_003][index % 6]).collect()
}

fn assert_equal(loaded: &[LoadedTensor], expected: &[Vec<u8>]) {
    assert_eq!(loaded.len(), expected.len());
    for (tensor, expected) in loaded.iter().zip(expected) {
        assert!(bytes(tensor) == expected, "{}", tensor.name);
    }
}

/// Loads everything that `url` names, and a copy on the disk, and compares the two.
fn compare(server: &Server, url: &str, on_disk: &Path) {
    let (table, request) = open(server, &[url], &[], &Interrupt::new()).unwrap();
    let local = WeightsTable::open(&[on_disk.to_owned()]).unwrap();
    assert_eq!(table.tensors(), local.tensors(), "{url}");
    assert_eq!(table.metadata, local.metadata);
    let remote = load_chosen(&table, &whole(&table), &request, &mut going_on).unwrap();
    let local =
        load_chosen(&local, &whole(&local), &ChosenRequest::default(), &mut going_on).unwrap();
    assert!(!remote.is_empty());
    for (remote, local) in remote.iter().zip(&local) {
        assert_eq!(
            (&remote.shape, remote.ty, remote.stride),
            (&local.shape, local.ty, local.stride)
        );
        assert!(remote.stride.is_some() || bytes(remote) == bytes(local), "{url}: {}", remote.name);
    }
}

/// Time after which something that should end at once counts as hanging. Busy machines take seconds.
const HANGS: Duration = Duration::from_secs(60);

#[test]
fn every_format_from_every_service() {
    let server = Server::start(Behaviour { one_in: 5, ..Behaviour::default() });
    let folder = tempfile::tempdir().unwrap();
    let read = |path: &Path| std::fs::read(path).unwrap();

    let single = fixtures().join("models/llama3_rope/model.safetensors");
    server.put("box/a b/one.safetensors", read(&single));
    compare(&server, "s3://box/a b/one.safetensors", &single);
    compare(&server, "gs://box/a b/one.safetensors", &single);
    compare(&server, &format!("{}/box/a%20b/one.safetensors", server.url()), &single);
    server.put("me/box/one.safetensors", read(&single));
    server.put("box/one.safetensors", read(&single));
    compare(&server, "az://box/one.safetensors", &single);

    // A folder with an index, in S3 and on a server that lists nothing.
    let mut map = serde_json::Map::new();
    for shard in 0..3 {
        let name = format!("model-{shard}.safetensors");
        let (file, all) = file_of(10 * shard, &sizes(5 + shard));
        std::fs::write(folder.path().join(&name), &file).unwrap();
        server.put(&format!("box/shards/{name}"), file);
        for index in 0..all.len() {
            map.insert(format!("t{:04}", 10 * shard + index), name.clone().into());
        }
    }
    let index = serde_json::to_vec(&serde_json::json!({ "weight_map": map })).unwrap();
    std::fs::write(folder.path().join("model.safetensors.index.json"), &index).unwrap();
    server.put("box/shards/model.safetensors.index.json", index);
    compare(&server, "s3://box/shards", folder.path());
    compare(&server, "s3://box/shards/", folder.path());
    compare(&server, &format!("{}/box/shards/", server.url()), folder.path());

    // A folder without an index.
    server.put("box/bare/x.safetensors", read(&single));
    server.put("box/bare/notes.txt", b"none".to_vec());
    compare(&server, "s3://box/bare", &single);

    // GGUF files, with and without the name of one, and a pack.
    let gguf = std::fs::read_dir(fixtures().join("gguf")).unwrap().flatten().find_map(|folder| {
        let mut files = std::fs::read_dir(folder.path()).ok()?.flatten().map(|file| file.path());
        files.find(|path| path.extension().is_some_and(|it| it == "gguf"))
    });
    let gguf = gguf.unwrap();
    server.put("box/model.gguf", read(&gguf));
    server.put("box/blob", read(&gguf));
    compare(&server, "s3://box/model.gguf", &gguf);
    compare(&server, "s3://box/blob", &gguf);
    let packed = folder.path().join("model.fbay");
    let output = OutputFile::replace(&packed).unwrap();
    let source = fixtures().join("models/qwen3_moe");
    pack(&source, output, PackOptions::default(), &mut |_, _| true).unwrap();
    server.put("box/model.fbay", read(&packed));
    compare(&server, &format!("{}/box/model.fbay", server.url()), &packed);
}

#[test]
fn failing_servers_cost_time_and_no_bytes() {
    let (file, all) = file_of(0, &sizes(60));
    for one_in in [20, 3] {
        for has_etags in [true, false] {
            let behaviour = Behaviour { one_in, has_etags, ..Behaviour::default() };
            let server = Server::start(behaviour);
            server.put("box/m.safetensors", file.clone());
            let url = format!("{}/box/m.safetensors", server.url());
            let hedge = if has_etags { "true" } else { "false" };
            let options = [("connections", "16"), ("request_bytes", "2097152"), ("hedge", hedge)];
            let (table, request) = open(&server, &[&url], &options, &Interrupt::new()).unwrap();
            let loaded = load_chosen(&table, &whole(&table), &request, &mut going_on).unwrap();
            assert_equal(&loaded, &all);
            // A server goes on with a request that is given up for a second one.
            let most = server.most_running();
            assert!(has_etags || most <= 16, "{most}");
        }
    }
}

fn total(asked: &[Asked]) -> u64 {
    asked.iter().filter_map(|(_, range)| range.as_ref()).map(|range| range.end - range.start).sum()
}

#[test]
fn only_what_is_asked_for_is_read() {
    let server = Server::start(Behaviour::default());
    let (file, all) = file_of(0, &sizes(60));
    let (data, file_bytes) = (file.len() - all.concat().len(), file.len() as u64);
    server.put("box/m.safetensors", file);
    let url = "s3://box/m.safetensors";
    // A second request where an answer is late would count twice.
    let options = [("hedge", "false")];
    let (table, request) = open(&server, &[url], &options, &Interrupt::new()).unwrap();
    let asked = server.take_asked();
    assert_eq!(asked, [("box/m.safetensors".to_owned(), Some(0..256 << 10))]);

    // All of it: every byte once, in few requests although there are many tensors.
    let loaded = load_chosen(&table, &whole(&table), &request, &mut going_on).unwrap();
    assert_equal(&loaded, &all);
    let asked = server.take_asked();
    assert_eq!(total(&asked), file_bytes - data as u64);

    // A tensor, and a range of another.
    let slice = Some(DimensionSlice { dimension: 0, start: 1_000_001, stop: 2_000_000 });
    let choices = [Choice { tensor: 3, slice: None }, Choice { tensor: 1, slice }];
    let loaded = load_chosen(&table, &choices, &request, &mut going_on).unwrap();
    assert!(bytes(&loaded[0]) == all[3] && bytes(&loaded[1]) == &all[1][1_000_001..2_000_000]);
    assert_eq!(total(&server.take_asked()), 900_000 + 999_999);
}

#[test]
fn small_tensors_share_requests() {
    let server =
        Server::start(Behaviour { latency: Duration::from_millis(20), ..Behaviour::default() });
    let (file, all) = file_of(0, &[5000; 2000]);
    server.put("box/m.safetensors", file);
    let options = [("connections", "4"), ("hedge", "false")];
    let (table, request) =
        open(&server, &["s3://box/m.safetensors"], &options, &Interrupt::new()).unwrap();
    server.take_asked();
    let loaded = load_chosen(&table, &whole(&table), &request, &mut going_on).unwrap();
    assert_equal(&loaded, &all);
    let asked = server.take_asked();
    assert!(asked.len() < 100, "{} requests for 10 MB", asked.len());
    assert!(server.most_running() <= 4);
}

#[test]
fn many_requests_hide_latency() {
    let server =
        Server::start(Behaviour { latency: Duration::from_millis(200), ..Behaviour::default() });
    let (file, all) = file_of(0, &[2 << 20; 32]);
    server.put("box/m.safetensors", file);
    let options = [("connections", "32")];
    let (table, request) =
        open(&server, &["s3://box/m.safetensors"], &options, &Interrupt::new()).unwrap();
    let loaded = load_chosen(&table, &whole(&table), &request, &mut going_on).unwrap();
    assert_equal(&loaded, &all);
    assert!(server.most_running() > 16);
}

#[test]
fn late_answers_are_asked_for_again() {
    const LATE: &[Fault] = &[Fault::Slow(Duration::from_secs(4))];
    // Longer than the test may take on a busy machine.
    const NEVER: &[Fault] = &[Fault::Slow(Duration::from_secs(300))];
    let behaviour = Behaviour { latency: Duration::from_millis(20), ..Behaviour::default() };
    let server = Server::start(behaviour);
    let (file, all) = file_of(0, &[2 << 20; 32]);
    server.put("box/m.safetensors", file);
    let load = |hedge: &str, faults| {
        server.behave(behaviour);
        let options = [("hedge", hedge)];
        let url = ["s3://box/m.safetensors"];
        let (table, request) = open(&server, &url, &options, &Interrupt::new()).unwrap();
        server.behave(Behaviour { one_in: 20, faults, ..behaviour });
        server.take_asked();
        let started = Instant::now();
        let loaded = load_chosen(&table, &whole(&table), &request, &mut going_on).unwrap();
        assert_equal(&loaded, &all);
        (started.elapsed(), total(&server.take_asked()))
    };
    let (seconds, asked) = load("false", LATE);
    assert!(seconds >= Duration::from_secs(4), "{seconds:?}");
    let (seconds, asked_more) = load("true", NEVER);
    assert!(seconds < Duration::from_secs(200), "{seconds:?}");
    assert!(asked_more > asked, "no request was made twice");
}

/// Returns the words of the error of a load.
fn refused(table: &WeightsTable, request: &ChosenRequest) -> String {
    let error = load_chosen(table, &whole(table), request, &mut going_on).err().unwrap();
    let LoadError::Read { .. } = &error else { panic!("{error}") };
    let mut words = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(error) = cause {
        words = format!("{words}: {error}");
        cause = error.source();
    }
    words
}

#[test]
fn an_object_that_changes_is_an_error() {
    let (file, _) = file_of(0, &[3_000_000, 17]);
    let (other, _) = file_of(7, &[3_000_000, 17]);
    let (longer, _) = file_of(0, &[3_000_000, 18]);
    for (has_etags, knows_if_match, next, words) in [
        (true, true, &other, "its ETag no longer matches"),
        (true, false, &other, "its ETag was \"v1\", now it is \"v2\""),
        (false, false, &longer, "bytes, now it has"),
    ] {
        let server = Server::start(Behaviour { has_etags, knows_if_match, ..Behaviour::default() });
        server.put("box/m.safetensors", file.clone());
        let url = format!("{}/box/m.safetensors", server.url());
        let (table, request) = open(&server, &[&url], &[], &Interrupt::new()).unwrap();
        server.put("box/m.safetensors", next.clone());
        let said = refused(&table, &request);
        for part in [words, &url, "at byte", "\"t000"] {
            assert!(said.contains(part), "{part} is not in: {said}");
        }
    }
}

#[test]
fn errors_say_what_is_wrong() {
    let server = Server::start(Behaviour::default());
    let (file, _) = file_of(0, &[3_000_000]);
    server.put("box/m.safetensors", file);
    server.put("box/empty.gguf", Vec::new());
    server.put("box/page.gguf", b"<html><body>Please log in</body></html>".to_vec());
    let opening =
        |url: &str| open(&server, &[url], &[], &Interrupt::new()).unwrap_err().to_string();
    let http = |path: &str| format!("{}/{path}", server.url());
    for (url, words) in [
        (http("box/no.gguf"), "there is no such object"),
        ("s3://box/no.gguf".to_owned(), "there is no such object (NoSuchKey: none here)"),
        ("s3://box/no".to_owned(), "there is no object of this name, and no folder"),
        (http("box/denied.gguf"), "access is denied (status 403) (AccessDenied: not yours)"),
        ("gs://box/denied.gguf".to_owned(), "access is denied"),
        (http("box/empty.gguf"), "the file is empty"),
        (http("box/page.gguf"), "it is a web page"),
        (http("box/nothing"), "an HTTP server does not list other files"),
    ] {
        let said = opening(&url);
        assert!(said.contains(words) && said.contains(&url), "{words} is not in: {said}");
    }
    // Neither the query nor the password of a URL is shown.
    let said = opening(&format!("{}?secret=1", http("box/no.gguf")));
    assert!(said.contains("box/no.gguf") && !said.contains("secret"), "{said}");
    let asked = server.take_asked();
    assert!(asked.last().unwrap().0.ends_with("box/no.gguf?secret=1"), "{asked:?}");

    let m = http("box/m.safetensors");
    let behaviours = [
        (Fault::Status(503), "status 503", 4),
        (Fault::Status(400), "status 400", 1),
        (Fault::CutBody, "", 4),
        (Fault::ShortBody, "ended", 4),
        (Fault::NoAnswer, "", 4),
    ];
    for (fault, words, attempts) in behaviours {
        server.behave(Behaviour::default());
        let options = [("retries", "3"), ("connections", "1")];
        let (table, request) = open(&server, &[&m], &options, &Interrupt::new()).unwrap();
        let faults: &'static [Fault] = Box::leak(Box::new([fault]));
        server.behave(Behaviour { one_in: 1, faults, ..Behaviour::default() });
        let said = refused(&table, &request);
        let attempts = format!("after {attempts} attempts");
        for part in [words, &attempts, &m, "tensor \"t0000\"", "at byte"] {
            assert!(said.contains(part), "{fault:?}: {part} is not in: {said}");
        }
    }
    server.behave(Behaviour { knows_ranges: false, ..Behaviour::default() });
    let said = opening(&m);
    assert!(said.contains("sent the whole file instead of a range"), "{said}");
    // Nobody listens on a port that was free a moment ago.
    let bound = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let said = opening(&format!("http://{bound}/box/m.safetensors"));
    assert!(said.contains("after 3 attempts"), "the usual number is larger: {said}");
}

#[test]
fn interrupts_and_dropped_streams_end_requests() {
    let server = Server::start(Behaviour::default());
    let (file, _) = file_of(0, &[1 << 20; 24]);
    server.put("box/m.safetensors", file);
    let url = "s3://box/m.safetensors";
    let interrupt = Interrupt::new();
    let (table, request) = open(&server, &[url], &[], &interrupt).unwrap();
    let faults: &'static [Fault] = &[Fault::Silence];
    server.behave(Behaviour { one_in: 1, faults, ..Behaviour::default() });

    // A load that is interrupted while every server is silent.
    let started = Instant::now();
    let asks = interrupt.clone();
    let waits = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        asks.request();
    });
    let stopped = load_chosen(&table, &whole(&table), &request, &mut going_on);
    assert!(matches!(stopped, Err(LoadError::Interrupted)));
    assert!(started.elapsed() < HANGS, "{:?}", started.elapsed());
    waits.join().unwrap();
    interrupt.clear();

    // A load whose caller has enough, with an interrupt that nobody requests.
    let started = Instant::now();
    let mut enough = |_, _| match started.elapsed() > Duration::from_millis(300) {
        true => ControlFlow::Break(()),
        false => ControlFlow::Continue(()),
    };
    let stopped = load_chosen(&table, &whole(&table), &request, &mut enough);
    assert!(matches!(stopped, Err(LoadError::Interrupted)));
    assert!(started.elapsed() < HANGS, "{:?}", started.elapsed());

    // A stream that is dropped.
    let started = Instant::now();
    let table = Arc::new(table);
    let mut stream = TensorStream::start(
        Arc::clone(&table),
        whole(&table),
        request.clone(),
        StreamOrder::Files,
        8 << 20,
    )
    .unwrap();
    assert!(matches!(stream.next(Duration::from_millis(200)), Ok(Next::NotYet)));
    drop(stream);
    assert!(started.elapsed() < HANGS, "{:?}", started.elapsed());

    // Opening.
    let started = Instant::now();
    let asks = interrupt.clone();
    let waits = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        asks.request();
    });
    assert!(open(&server, &[url], &[], &interrupt).is_err());
    assert!(started.elapsed() < HANGS, "{:?}", started.elapsed());
    waits.join().unwrap();
    drop((request, table));
    for _ in 0..100 {
        if server.connections() == 0 {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("{} connections are still open", server.connections());
}

#[test]
fn streams_are_in_order_and_within_their_budget() {
    let server = Server::start(Behaviour { one_in: 20, ..Behaviour::default() });
    let (file, all) = file_of(0, &sizes(48));
    server.put("box/m.safetensors", file);
    let options = [("hedge", "false")];
    let (table, request) =
        open(&server, &["s3://box/m.safetensors"], &options, &Interrupt::new()).unwrap();
    let table = Arc::new(table);
    let budget = 16 << 20;
    let mut stream =
        TensorStream::start(Arc::clone(&table), whole(&table), request, StreamOrder::Files, budget)
            .unwrap();
    let mut found = 0;
    std::thread::sleep(Duration::from_millis(500));
    // Nothing was taken yet, so no more than the budget was read.
    assert!(total(&server.take_asked()) <= budget + (256 << 10));
    loop {
        match stream.next(Duration::from_secs(1)).unwrap() {
            Next::Tensors(tensors) => {
                for tensor in &tensors {
                    assert_eq!(tensor.name, table.tensors()[found].name);
                    let number: usize = tensor.name[1..].parse().unwrap();
                    assert!(bytes(tensor) == all[number], "{}", tensor.name);
                    found += 1;
                }
            }
            Next::End => break,
            Next::NotYet => {}
        }
    }
    assert_eq!(found, all.len());
}
