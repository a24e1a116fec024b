//! Pulls from a hub on this machine that redirects, cuts, throttles and lies.

mod folder;
#[expect(dead_code, reason = "the tests of the command line use more of it")]
mod hub;

use std::fs;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use forebay_library::{Entry, Error, Library, Name, Options, Progress, pull};

use hub::{Answer, Hub, Served};

const RANGE: usize = 1000;
const SIZE: usize = 10_500;

fn bytes(size: usize) -> Vec<u8> {
    (0..size).map(|i| (i * 7 + i / 251) as u8).collect()
}

fn model() -> Vec<Served> {
    vec![Served::large("m-Q8_0.gguf", bytes(SIZE)), Served::small("README.md", "text")]
}

struct Place {
    folder: tempfile::TempDir,
    library: Library,
}

impl Place {
    fn new() -> Place {
        let folder = tempfile::tempdir().unwrap();
        let library = Library::open(folder.path().join("models"));
        Place { folder, library }
    }

    fn pull(&self, hub: &Hub, name: &str) -> Result<Entry, Error> {
        self.pull_with(&options(hub), name, &|| false)
    }

    fn pull_with(
        &self,
        options: &Options,
        name: &str,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Entry, Error> {
        pull(&self.library, &name.parse::<Name>().unwrap(), options, &|_| {}, cancelled)
    }

    /// Asserts that the library has the model, with its right bytes and nothing unfinished.
    #[track_caller]
    fn has_model(&self) {
        let entry = self.library.find("o/r").unwrap();
        assert_eq!(entry.name, "o/r:Q8_0");
        assert!(fs::read(&entry.path).unwrap() == bytes(SIZE));
        assert!(entry.path.starts_with(self.folder.path()));
        let listing = self.library.list().unwrap();
        assert!(listing.unfinished.is_empty() && listing.damaged.is_empty());
        let beside = fs::read_dir(entry.path.parent().unwrap()).unwrap();
        let names: Vec<_> = beside.map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["m-Q8_0.gguf"]);
    }

    /// Asserts that a failed pull left no model.
    #[track_caller]
    fn has_nothing(&self) {
        assert!(self.library.list().unwrap().entries.is_empty());
        assert!(self.library.find("o/r").unwrap_err().is_not_found());
    }
}

fn options(hub: &Hub) -> Options {
    Options {
        endpoint: hub.address.clone(),
        connections: 3,
        range_bytes: RANGE as u64,
        timeout: Duration::from_millis(500),
        backoff: Duration::from_millis(1),
        ..Options::default()
    }
}

#[test]
fn ranges_arrive_and_progress_is_told() {
    let (place, hub) = (Place::new(), Hub::start(model(), |_, _| Answer::Slow(100)));
    let told = Mutex::new(Vec::new());
    let progress = |now: Progress| told.lock().unwrap().push(now);
    let name: Name = "hf.co/o/r:q8_0".parse().unwrap();
    let entry = pull(&place.library, &name, &options(&hub), &progress, &|| false).unwrap();
    assert_eq!((entry.name.as_str(), entry.size_bytes), ("o/r:Q8_0", SIZE as u64));
    place.has_model();
    assert_eq!(hub.downloads().len(), SIZE.div_ceil(RANGE));
    assert!(hub.downloads().iter().all(|request| request.range().is_some()));
    let told = told.into_inner().unwrap();
    let total_bytes = SIZE as u64;
    assert_eq!(told[0], Progress::Listing);
    assert_eq!(told[1], Progress::Downloading { done_bytes: 0, total_bytes });
    assert!(told.contains(&Progress::Downloading { done_bytes: total_bytes, total_bytes }));
    assert_eq!(told.last(), Some(&Progress::Verifying { done_bytes: total_bytes, total_bytes }));
    // A second pull only asks for the list.
    place.pull(&hub, "o/r").unwrap();
    assert_eq!(hub.downloads().len(), SIZE.div_ceil(RANGE));
}

#[test]
fn a_cancelled_pull_keeps_the_bytes_of_unfinished_ranges() {
    let (place, hub) = (Place::new(), Hub::start(model(), |_, _| Answer::Slow(100)));
    // One range for the whole file.
    let options = Options { connections: 1, range_bytes: 1 << 20, ..options(&hub) };
    let name: Name = "o/r".parse().unwrap();
    let arrived = Mutex::new(0);
    let progress = |now: Progress| {
        if let Progress::Downloading { done_bytes, .. } = now {
            *arrived.lock().unwrap() = done_bytes;
        }
    };
    let cancelled = || *arrived.lock().unwrap() > 0;
    let stopped = pull(&place.library, &name, &options, &progress, &cancelled);
    assert!(matches!(stopped, Err(Error::Cancelled)), "{stopped:?}");
    let kept = *arrived.lock().unwrap();
    assert!(kept > 0 && kept < SIZE as u64, "{kept}");
    let first = Mutex::new(None);
    let progress = |now: Progress| {
        if let Progress::Downloading { done_bytes, .. } = now {
            first.lock().unwrap().get_or_insert(done_bytes);
        }
    };
    pull(&place.library, &name, &options, &progress, &|| false).unwrap();
    place.has_model();
    assert!(first.into_inner().unwrap() >= Some(kept));
    let last = hub.downloads().last().and_then(hub::Request::range).unwrap();
    assert!(last.start as u64 >= kept && last.end == SIZE, "{last:?}");
}

#[test]
fn another_host_never_sees_the_token() {
    let other = Hub::start(model(), |_, _| Answer::Usual);
    let to = other.address.clone();
    let hub = Hub::start(model(), move |request, _| match request.path.contains("/resolve/") {
        true => Answer::Redirect(format!("{to}{}?signature=x", request.path)),
        false => Answer::Usual,
    });
    let place = Place::new();
    let options = Options { token: Some("secret".into()), ..options(&hub) };
    place.pull_with(&options, "o/r", &|| false).unwrap();
    place.has_model();
    let has_token = |request: &hub::Request| {
        request.headers.get("authorization").is_some_and(|value| value == "Bearer secret")
    };
    assert!(!hub.requests().is_empty() && hub.requests().iter().all(has_token));
    assert_eq!(other.downloads().len(), SIZE.div_ceil(RANGE));
    let is_silent =
        |request: &hub::Request| request.headers.values().all(|value| !value.contains("secret"));
    assert!(other.requests().iter().all(is_silent));
}

#[test]
fn redirects_without_end_and_lists_of_other_hosts_are_refused() {
    let hub = Hub::start(model(), |request, _| Answer::Redirect(request.path.clone()));
    let place = Place::new();
    let error = place.pull(&hub, "o/r").unwrap_err().to_string();
    assert!(error.contains("redirects without end"), "{error}");
    place.has_nothing();
}

#[test]
fn a_cut_connection_goes_on_where_it_ended() {
    let hub = Hub::start(model(), |_, before| match before % 2 {
        0 => Answer::Cut(300),
        _ => Answer::Usual,
    });
    let place = Place::new();
    place.pull(&hub, "o/r").unwrap();
    place.has_model();
    let starts: Vec<usize> = hub.downloads().iter().map(|r| r.range().unwrap().start).collect();
    assert!(starts.iter().any(|start| start % RANGE != 0), "{starts:?}");
}

#[test]
fn a_connection_that_is_always_cut_ends_with_an_error_and_resumes() {
    let hub = Hub::start(model(), |request, _| match request.range() {
        Some(range) if range.start >= 5000 => Answer::Cut(0),
        _ => Answer::Usual,
    });
    let place = Place::new();
    let options = Options { connections: 1, ..options(&hub) };
    let error = place.pull_with(&options, "o/r", &|| false).unwrap_err();
    assert!(matches!(error, Error::Network { .. }), "{error}");
    place.has_nothing();
    assert_eq!(place.library.list().unwrap().unfinished.len(), 1);
    let hub = Hub::start(model(), |_, _| Answer::Usual);
    let entry = place.pull(&hub, "o/r");
    entry.unwrap();
    place.has_model();
    let first = hub.downloads().iter().map(|r| r.range().unwrap().start).min();
    assert_eq!(first, Some(5000), "the finished ranges are not asked for again");
}

#[test]
fn silence_ends_after_the_timeout_and_is_tried_again() {
    let hub = Hub::start(model(), |_, before| match before {
        0 | 1 => Answer::Silent(Duration::from_secs(120)),
        _ => Answer::Usual,
    });
    let place = Place::new();
    let began = Instant::now();
    place.pull(&hub, "o/r").unwrap();
    place.has_model();
    assert!(began.elapsed() < Duration::from_secs(100));
}

#[test]
fn a_server_without_ranges_sends_the_file_once() {
    let hub = Hub::start(model(), |_, _| Answer::Whole);
    let place = Place::new();
    place.pull(&hub, "o/r").unwrap();
    place.has_model();
    // Each connection may find out by itself.
    assert!(hub.downloads().len() <= 3, "{}", hub.downloads().len());
}

#[test]
fn a_server_without_ranges_that_cuts_is_asked_again() {
    let hub = Hub::start(model(), |_, before| match before {
        0..=4 => Answer::WholeCut(1500 * (before + 1)),
        _ => Answer::Whole,
    });
    let place = Place::new();
    place.pull(&hub, "o/r").unwrap();
    place.has_model();
    // A file of one range is asked for without a range, and cut once.
    let one = Options { range_bytes: 1 << 20, ..options(&hub) };
    let hub = Hub::start(model(), |_, before| match before {
        0 => Answer::Cut(4000),
        _ => Answer::Whole,
    });
    let place = Place::new();
    let one = Options { endpoint: hub.address.clone(), ..one };
    place.pull_with(&one, "o/r", &|| false).unwrap();
    place.has_model();
}

#[test]
fn wrong_lengths_are_errors() {
    let total = |total: u64| {
        move |request: &hub::Request, _: usize| match request.range() {
            Some(range) => {
                Answer::ContentRange(format!("bytes {}-{}/{total}", range.start, range.end - 1))
            }
            None => Answer::Usual,
        }
    };
    let size = SIZE as u64;
    for hub in [
        Hub::start(model(), total(size - 1)),
        Hub::start(model(), total(size + 1)),
        Hub::start(model(), |_, _| Answer::Length(SIZE as u64 - 1)),
        Hub::start(model(), |_, _| Answer::Length(SIZE as u64 + 1)),
        Hub::start(model(), |_, _| Answer::Unannounced(SIZE + 1)),
    ] {
        let place = Place::new();
        let error = place.pull(&hub, "o/r").unwrap_err();
        assert!(matches!(error, Error::WrongLength { .. }), "{error}");
        place.has_nothing();
    }
    let hub = Hub::start(model(), |_, _| Answer::ContentRange("bytes 0-9/10500".into()));
    let error = Place::new().pull(&hub, "o/r").unwrap_err().to_string();
    assert!(error.contains("instead of"), "{error}");
}

#[test]
fn a_list_with_another_length_is_an_error() {
    for wrong in [SIZE as u64 - 1, SIZE as u64 + 1] {
        let mut files = model();
        files[0].listed_size = Some(wrong);
        let place = Place::new();
        let error = place.pull(&Hub::start(files, |_, _| Answer::Usual), "o/r").unwrap_err();
        assert!(matches!(error, Error::WrongLength { .. } | Error::Network { .. }), "{error}");
        place.has_nothing();
    }
}

#[test]
fn wrong_bytes_are_deleted() {
    for file in 0..2 {
        let mut files = vec![
            Served::large("model.safetensors", bytes(SIZE)),
            Served::small("config.json", "{}"),
        ];
        let length = if file == 0 { 64 } else { 40 };
        files[file].listed_checksum = Some("0".repeat(length));
        let place = Place::new();
        let hub = Hub::start(files.clone(), |_, _| Answer::Usual);
        let error = place.pull(&hub, "o/r").unwrap_err();
        assert!(matches!(error, Error::WrongChecksum { .. }), "{error}");
        assert!(error.to_string().contains(&files[file].path), "{error}");
        place.has_nothing();
        // The next pull begins anew, and does not keep the bytes.
        let error = place.pull(&hub, "o/r").unwrap_err();
        assert!(matches!(error, Error::WrongChecksum { .. }), "{error}");
    }
}

#[test]
fn busy_servers_are_asked_again_after_the_time_that_they_name() {
    let hub = Hub::start(model(), |request, before| match before {
        0 if request.path.contains("/resolve/") => Answer::Status(429, "Retry-After: 1\r\n"),
        1 => Answer::Status(503, ""),
        _ => Answer::Usual,
    });
    let place = Place::new();
    let began = Instant::now();
    place.pull(&hub, "o/r").unwrap();
    place.has_model();
    assert!(began.elapsed() >= Duration::from_secs(1));
    // A wait of hours is an error at once.
    let hub = Hub::start(model(), |_, _| Answer::Status(429, "Retry-After: 9999\r\n"));
    let began = Instant::now();
    let error = Place::new().pull(&hub, "o/r").unwrap_err();
    assert!(matches!(error, Error::Status { status: 429, .. }), "{error}");
    assert!(began.elapsed() < Duration::from_secs(60));
    let hub = Hub::start(model(), |_, _| Answer::Status(500, ""));
    let error = Place::new().pull(&hub, "o/r").unwrap_err();
    assert!(matches!(error, Error::Status { status: 500, .. }), "{error}");
    assert_eq!(hub.requests().len(), 6);
}

#[test]
fn refusals_say_what_to_do() {
    for (status, header, words) in [
        (401, "", "set HF_TOKEN"),
        (401, "X-Error-Code: GatedRepo\r\n", "accept the conditions"),
        (403, "", "token"),
        (404, "", "does not exist"),
        (404, "X-Error-Code: RevisionNotFound\r\n", "no such revision"),
    ] {
        let hub = Hub::start(model(), move |_, _| Answer::Status(status, header));
        let error = Place::new().pull(&hub, "o/r").unwrap_err().to_string();
        assert!(error.contains(words) && error.contains("o/r"), "{status}: {error}");
        assert_eq!(hub.requests().len(), 1, "{status}");
    }
}

#[test]
fn a_list_cannot_name_paths_outside_the_repository() {
    for path in [
        "../m.gguf",
        "/etc/m.gguf",
        "a/../../m.gguf",
        "a\\..\\m.gguf",
        "a\n.gguf",
        "./m.gguf",
        "a//m.gguf",
        "C:m.gguf",
    ] {
        let hub = Hub::start(vec![Served::large(path, bytes(10))], |_, _| Answer::Usual);
        let place = Place::new();
        let error = place.pull(&hub, "o/r").unwrap_err();
        assert!(matches!(error, Error::BadPath { .. }), "{path}: {error}");
        assert!(!place.library.folder().exists(), "{path}");
        assert!(hub.downloads().is_empty());
    }
}

#[test]
fn a_cancelled_pull_keeps_what_it_has() {
    let hub = Hub::start(model(), |_, _| Answer::Slow(10));
    let place = Place::new();
    let is_some_done = || hub.downloads().len() > 6;
    let error = place.pull_with(&options(&hub), "o/r", &is_some_done).unwrap_err();
    assert!(matches!(error, Error::Cancelled), "{error}");
    place.has_nothing();
    let hub = Hub::start(model(), |_, _| Answer::Usual);
    place.pull(&hub, "o/r").unwrap();
    place.has_model();
    let count = hub.downloads().len();
    assert!(count > 0 && count < SIZE.div_ceil(RANGE), "{count}");
}

#[test]
fn two_pulls_of_one_repository_do_not_meet() {
    let hub = Hub::start(model(), |_, _| Answer::Slow(10));
    let place = Place::new();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| place.pull(&hub, "o/r"));
        while hub.downloads().is_empty() {
            std::thread::yield_now();
        }
        let error = place.pull(&hub, "o/r").unwrap_err();
        assert!(matches!(error, Error::Locked { .. }), "{error}");
        let error = place.library.remove("o/r").unwrap_err();
        assert!(matches!(error, Error::Locked { .. }), "{error}");
        first.join().unwrap().unwrap();
    });
    place.has_model();
}

#[test]
fn more_than_the_disk_holds_is_refused_before_the_download() {
    let mut files = model();
    files[0].listed_size = Some(1 << 60);
    let hub = Hub::start(files, |_, _| Answer::Usual);
    let place = Place::new();
    let options = options(&hub);
    let error = place.pull_with(&options, "o/r", &|| false).unwrap_err();
    assert!(matches!(error, Error::Space { .. }), "{error}");
    assert!(hub.downloads().is_empty());
}
