//! Tests of loading and unloading, with a tiny model under several names and a loader that decides what fits.

use std::future::Future;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use forebay_engine::GenerateOptions;
use forebay_engine::engine::{Event, Request};

use super::*;
use crate::run::submit;
use crate::testing::{ALL, Test, entry, somebody, until};

fn loaded(models: &Models) -> Vec<String> {
    let mut names: Vec<String> = models.loaded().into_iter().map(|status| status.name).collect();
    names.sort();
    names
}

/// Starts to ask for a model in a task of its own.
fn ask(models: &Arc<Models>, name: &str) -> tokio::task::JoinHandle<Result<Lease, ApiError>> {
    let (models, entry) = (models.clone(), entry(name));
    tokio::spawn(async move { models.get(&somebody(), entry, None).await })
}

async fn got(models: &Arc<Models>, name: &str) -> Lease {
    models.get(&somebody(), entry(name), None).await.unwrap()
}

fn request(max_tokens: usize) -> Request {
    let options = GenerateOptions {
        max_tokens: Some(max_tokens),
        ignore_end: true,
        ..GenerateOptions::default()
    };
    Request { prompt: vec![1, 2, 3], options, ..Request::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_come_together_share_a_load() {
    let test = Test::new(&[("a", 6, 6), ("b", 4, 4)]);
    let models = Arc::new(test.models(KeepAlive::Forever));
    let asked: Vec<_> = (0..8).map(|_| ask(&models, "a")).collect();
    for lease in asked {
        assert_eq!(lease.await.unwrap().unwrap().name, "a");
    }
    // Another model that fits beside it gets the rest, and the first one stays.
    got(&models, "b").await;
    assert_eq!(test.loads(), [("a".to_owned(), None), ("b".to_owned(), Some(4))]);
    assert_eq!(loaded(&models), ["a", "b"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn models_that_do_not_fit_together_take_turns_without_end() {
    let test = Test::new(&[("a", 6, 6), ("b", 7, 7), ("c", 8, 8)]);
    let models = Arc::new(test.models(KeepAlive::Forever));
    let clients = ["a", "b", "c", "a", "b", "c"].map(|name| {
        let models = models.clone();
        tokio::spawn(async move {
            for _ in 0..15 {
                let lease = got(&models, name).await;
                assert_eq!(lease.name, name);
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        })
    });
    for client in clients {
        tokio::time::timeout(Duration::from_secs(60), client)
            .await
            .expect("no client starves")
            .unwrap();
    }
    // Each was alone, so each got all memory.
    assert!(test.loads().iter().all(|(_, room)| room.is_none()), "{:?}", test.loads());
    let loads = test.loads().len();
    assert_eq!(test.had_tokenizer.load(Ordering::SeqCst), loads - 1, "one is read once");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_waits_for_room_is_not_overtaken() {
    let test = Test::new(&[("a", 6, 6), ("b", 6, 6)]);
    let models = Arc::new(test.models(KeepAlive::Forever));
    let first = got(&models, "a").await;
    let second = ask(&models, "b");
    until(|| models.shared.lock().loaded[0].is_closing).await;
    // Others for the loaded model wait behind it.
    let third = ask(&models, "a");
    until(|| models.waiting() == 2).await;
    drop(first);
    let second = second.await.unwrap().unwrap();
    assert!(!third.is_finished());
    assert_eq!(loaded(&models), ["b"]);
    drop(second);
    assert_eq!(third.await.unwrap().unwrap().name, "a");
    assert_eq!(test.names(), ["a", "b", "a"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_goes_leaves_the_others_alone() {
    let test = Test::new(&[("a", 6, 6), ("b", 6, 6)]);
    let models = Arc::new(test.models(KeepAlive::Forever));
    // While its model waits for another one: that one can be used again.
    let first = got(&models, "a").await;
    let gone = ask(&models, "b");
    until(|| models.shared.lock().loaded[0].is_closing).await;
    gone.abort();
    until(|| models.waiting() == 0).await;
    assert_eq!(got(&models, "a").await.name, "a");
    drop(first);
    // While its model is loaded: the model is there for others.
    test.is_held.store(true, Ordering::SeqCst);
    let gone = ask(&models, "b");
    until(|| test.names() == ["a", "b"]).await;
    gone.abort();
    let stays = ask(&models, "b");
    until(|| models.waiting() == 1).await;
    test.is_held.store(false, Ordering::SeqCst);
    assert_eq!(stays.await.unwrap().unwrap().name, "b");
    assert_eq!(test.names(), ["a", "b"]);
    until(|| models.shared.lock().loaded[0].leases == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_nobody_takes_ends() {
    let test = Test::new(&[("a", 6, 6)]);
    let models = Arc::new(test.models(KeepAlive::Forever));
    test.is_held.store(true, Ordering::SeqCst);
    // The request waits, and nothing looks at it when its model comes.
    let caller = somebody();
    let mut waiting = Box::pin(models.get(&caller, entry("a"), None));
    assert!(matches!(
        waiting.as_mut().poll(&mut Context::from_waker(Waker::noop())),
        Poll::Pending
    ));
    test.is_held.store(false, Ordering::SeqCst);
    until(|| models.shared.lock().loaded.first().is_some_and(|slot| slot.leases == 1)).await;
    drop(waiting);
    until(|| models.shared.lock().loaded[0].leases == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_models_leave_in_time() {
    let test = Test::new(&[("a", 1, 1), ("b", 1, 1)]);
    let models = Arc::new(test.models(KeepAlive::For(Duration::from_millis(150))));
    let lease = got(&models, "a").await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(loaded(&models), ["a"], "it is used");
    let ended = Instant::now();
    drop(lease);
    until(|| loaded(&models).is_empty()).await;
    assert!(ended.elapsed() >= Duration::from_millis(150));
    // A request decides for itself, and later ones that say nothing follow it.
    drop(models.get(&somebody(), entry("a"), Some(KeepAlive::Forever)).await.unwrap());
    drop(got(&models, "a").await);
    let lease =
        models.get(&somebody(), entry("b"), Some(KeepAlive::For(Duration::ZERO))).await.unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(loaded(&models), ["a", "b"]);
    drop(lease);
    until(|| loaded(&models) == ["a"]).await;
    // Unloading waits until an idle model is gone, and a busy one leaves when it is idle.
    models.unload(&entry("a")).await;
    assert_eq!(loaded(&models), Vec::<String>::new());
    let lease = got(&models, "a").await;
    models.unload(&entry("a")).await;
    assert_eq!(loaded(&models), ["a"]);
    drop(lease);
    until(|| loaded(&models).is_empty()).await;
    models.unload(&entry("a")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_is_unloaded_while_others_wait_for_it() {
    let test = Test::new(&[("a", 6, 6), ("b", 6, 6)]);
    let models = Arc::new(test.models(KeepAlive::Forever));
    drop(got(&models, "a").await);
    test.is_held.store(true, Ordering::SeqCst);
    let second = ask(&models, "b");
    until(|| test.names().len() == 2).await;
    let third = ask(&models, "a");
    models.unload(&entry("a")).await;
    test.is_held.store(false, Ordering::SeqCst);
    drop(second.await.unwrap().unwrap());
    assert_eq!(third.await.unwrap().unwrap().name, "a");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_cannot_be_loaded_is_an_error_for_all_who_wait() {
    let test = Test::new(&[("a", 2, 2), ("b", 2, 2), ("large", 99, 11)]);
    let models = Arc::new(test.models(KeepAlive::Forever));
    let other = got(&models, "a").await;
    for is_panic in [false, true] {
        test.is_held.store(true, Ordering::SeqCst);
        test.panics.store(is_panic, Ordering::SeqCst);
        test.failures.store(usize::from(!is_panic), Ordering::SeqCst);
        let before = test.names().len();
        let asked: Vec<_> = (0..3).map(|_| ask(&models, "b")).collect();
        until(|| models.waiting() == 3 && test.names().len() > before).await;
        test.is_held.store(false, Ordering::SeqCst);
        for lease in asked {
            let error = lease.await.unwrap().err().unwrap();
            let expected = if is_panic { "the program failed" } else { "the disk is gone" };
            assert!(error.status == 500 && error.message.contains(expected), "{error}");
        }
    }
    // The next request tries again, and the other model has not noticed.
    got(&models, "b").await;
    assert_eq!(got(&models, "a").await.name, other.name);
    // A model that needs more than there is unloads the idle ones, waits for the busy one, and fails then.
    let large = ask(&models, "large");
    until(|| loaded(&models) == ["a"]).await;
    assert!(!large.is_finished());
    drop(other);
    let error = large.await.unwrap().err().unwrap();
    assert!(error.message.contains("too small"), "{error}");
    got(&models, "a").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_with_too_little_memory_gets_more_when_others_are_idle() {
    let test = Test::new(&[("a", 6, 6), ("b", 8, 2)]);
    let models = Arc::new(test.models(KeepAlive::Forever));
    let busy = got(&models, "a").await;
    drop(got(&models, "b").await);
    assert_eq!(test.loads(), [("a".to_owned(), None), ("b".to_owned(), Some(4))]);
    drop(got(&models, "b").await);
    assert_eq!(test.loads().len(), 2, "the other is still busy");
    drop(busy);
    drop(got(&models, "b").await);
    assert_eq!(test.loads()[2..], [("b".to_owned(), None)]);
    assert_eq!(loaded(&models), ["b"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_engine_takes_only_its_own_model_down() {
    let test = Test::new(&[("a", 2, 2), ("b", 2, 2)]);
    let models = Arc::new(test.models(KeepAlive::Forever));
    let other = got(&models, "b").await;
    let lease = got(&models, "a").await;
    let panics = Box::new(|_: Event| panic!("a test"));
    let ticket = submit(&somebody(), &lease.worker, request(4), panics).await.unwrap();
    until(|| lease.worker.is_broken()).await;
    assert!(
        submit(&somebody(), &lease.worker, request(1), Box::new(|_| panic!("ended")))
            .await
            .is_err()
    );
    // It is loaded again as soon as nobody has the old one.
    let again = ask(&models, "a");
    until(|| models.waiting() == 1).await;
    drop((ticket, lease));
    let again = again.await.unwrap().unwrap();
    assert_eq!(test.names(), ["b", "a", "a"]);
    assert_eq!(test.forgotten.load(Ordering::SeqCst), 0, "another model uses what is kept");
    for lease in [&again, &other] {
        let (sender, done) = oneshot::channel();
        let mut sender = Some(sender);
        let sink = Box::new(move |event: Event| {
            if let Event::Finished { statistics, .. } = event {
                let _ = sender.take().unwrap().send(statistics.generated_tokens);
            }
            std::ops::ControlFlow::Continue(())
        });
        let _ticket = submit(&somebody(), &lease.worker, request(4), sink).await.unwrap();
        assert_eq!(done.await, Ok(4));
    }
    // Numbers of passes go on when a model leaves and comes again.
    let passes = || {
        let text = models.metrics().unwrap();
        let line =
            text.lines().find(|line| line.starts_with("forebay_generate_passes{model=\"b\"}"));
        line.unwrap_or_else(|| panic!("{text}")).rsplit(' ').next().unwrap().parse::<u64>().unwrap()
    };
    until(|| passes() == 3).await;
    drop(other);
    models.unload(&entry("b")).await;
    assert_eq!(passes(), 3);
    got(&models, "b").await;
    assert_eq!(passes(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn names_and_limits() {
    let test = Test::new(&[("a", 6, 6), ("b", 6, 6)]);
    let models = Arc::new(test.models(KeepAlive::Forever));
    let missing = |error: ApiError| assert!(error.message.contains("model is missing"), "{error}");
    missing(models.entry(None).err().unwrap());
    drop(got(&models, "b").await);
    assert_eq!(models.entry(None).unwrap().name, "b", "it was used last");
    assert_eq!(models.entry(Some("a:latest")).unwrap().name, "a");
    let error = models.entry(Some("../a")).err().unwrap();
    assert!(error.status == 404 && error.message.contains("\"a\", \"b\""), "{error}");
    // A queue that is full refuses requests, and the end of the server refuses those that wait.
    let busy = got(&models, "b").await;
    let asked: Vec<_> = (0..100).map(|_| ask(&models, "a")).collect();
    until(|| models.waiting() == 100).await;
    assert_eq!(models.get(&somebody(), entry("a"), None).await.err().unwrap().status, 429);
    models.shared.lock().is_stopping = true;
    models.shared.changed.notify_all();
    for lease in asked {
        assert_eq!(lease.await.unwrap().err().unwrap().status, 503);
    }
    drop(busy);
}

/// Starts to ask for a model as this caller, and waits until the request waits.
async fn ask_as(
    models: &Arc<Models>,
    share: Share,
    name: &str,
) -> tokio::task::JoinHandle<Result<Lease, ApiError>> {
    let before = models.waiting();
    let (own, entry) = (models.clone(), entry(name));
    let caller = Caller::new("", Vec::new(), share);
    let asked = tokio::spawn(async move { own.get(&caller, entry, None).await });
    until(|| models.waiting() > before).await;
    asked
}

#[tokio::test(flavor = "multi_thread")]
async fn a_load_that_stands_still_holds_up_no_other_model() {
    let test = Test::new(&[("a", 3, 3), ("b", 3, 3), ("c", 3, 3)]);
    let models = Arc::new(test.models(KeepAlive::Forever));
    test.held.lock().unwrap().insert("a");
    test.held_measuring.lock().unwrap().insert("b");
    let (a, b) = (ask_as(&models, 1, "a").await, ask_as(&models, 1, "b").await);
    until(|| test.names() == ["a"]).await;
    // What the first one may take is not given away.
    drop(got(&models, "c").await);
    assert_eq!(test.loads(), [("a".to_owned(), None), ("c".to_owned(), Some(7))]);
    assert!(!a.is_finished() && !b.is_finished());
    test.held_measuring.lock().unwrap().clear();
    assert_eq!(b.await.unwrap().unwrap().name, "b");
    assert!(!a.is_finished());
    test.held.lock().unwrap().clear();
    assert_eq!(a.await.unwrap().unwrap().name, "a");
    assert_eq!(loaded(&models), ["a", "b", "c"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_load_models_in_turn() {
    let all = ["a", "b", "c", "d", "e"].map(|name| (name, ALL, ALL));
    let test = Test::new(&all);
    let models = Arc::new(test.models(KeepAlive::Forever));
    test.is_held.store(true, Ordering::SeqCst);
    let mut asked = vec![ask_as(&models, 1, "a").await];
    until(|| test.names() == ["a"]).await;
    for (share, name) in [(1, "b"), (1, "c"), (1, "d"), (2, "e")] {
        asked.push(ask_as(&models, share, name).await);
    }
    test.is_held.store(false, Ordering::SeqCst);
    // Each gives its model back at once, because the models are not loaded in the order of the requests.
    let ended = asked
        .into_iter()
        .map(|asked| tokio::spawn(async move { drop(asked.await.unwrap().unwrap()) }));
    for end in ended.collect::<Vec<_>>() {
        end.await.unwrap();
    }
    // A model that is being measured lets others pass, so one model of the first caller may come before.
    let mut names = test.names();
    let at = names.iter().position(|name| *name == "e").unwrap();
    assert!((1..=2).contains(&at), "the other caller need not wait for all: {names:?}");
    names.remove(at);
    assert_eq!(names, ["a", "b", "c", "d"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_server_ends_although_a_load_stands_still() {
    let test = Test::new(&[("a", 3, 3), ("b", 3, 3)]);
    let models = Arc::new(test.models(KeepAlive::Forever));
    test.held.lock().unwrap().insert("a");
    test.held_measuring.lock().unwrap().insert("b");
    let asked = [ask_as(&models, 1, "a").await, ask_as(&models, 1, "b").await];
    until(|| test.names() == ["a"]).await;
    asked.into_iter().for_each(|asked| asked.abort());
    until(|| Arc::strong_count(&models) == 1).await;
    drop(models);
    test.held.lock().unwrap().clear();
    test.held_measuring.lock().unwrap().clear();
}
