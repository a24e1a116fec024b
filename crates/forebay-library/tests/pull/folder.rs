//! What the library does with its folder: lists, finds, copies and removes.

use std::fs;
use std::path::PathBuf;

use forebay_library::Error;

use crate::hub::{Answer, Hub, Served};
use crate::{Place, bytes};

fn two_quants() -> Vec<Served> {
    vec![Served::large("m-Q8_0.gguf", bytes(3000)), Served::large("m-Q4_K_M.gguf", bytes(2000))]
}

/// Returns all regular files below the library's `files`.
fn files(place: &Place) -> Vec<PathBuf> {
    let mut folders = vec![place.library.folder().join("files")];
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { folders.push(path) } else { found.push(path) }
        }
    }
    found
}

fn names(place: &Place) -> Vec<String> {
    place.library.list().unwrap().entries.into_iter().map(|entry| entry.name).collect()
}

#[test]
fn a_name_without_quant_means_the_usual_one() {
    let hub = Hub::start(two_quants(), |_, _| Answer::Usual);
    let place = Place::new();
    assert_eq!(place.pull(&hub, "o/r:q8_0").unwrap().name, "o/r:Q8_0");
    assert_eq!(place.library.find("hf.co/O/R").unwrap().name, "o/r:Q8_0");
    assert_eq!(place.pull(&hub, "o/r").unwrap().name, "o/r:Q4_K_M");
    assert_eq!(place.library.find("o/r:latest").unwrap().name, "o/r:Q4_K_M");
    assert_eq!(names(&place), ["o/r:Q4_K_M", "o/r:Q8_0"]);
    place.library.copy("o/r:Q8_0", "o/r:Q6_K").unwrap();
    place.library.remove("o/r:Q4_K_M").unwrap();
    let error = place.library.find("o/r").unwrap_err().to_string();
    assert!(error.contains("o/r:Q6_K, o/r:Q8_0"), "{error}");
    for wrong in ["o/s", "o/r:Q2_K", "other"] {
        assert!(place.library.find(wrong).unwrap_err().is_not_found(), "{wrong}");
    }
    for wrong in ["../r", "/etc/passwd", "o/r/../../x", "o\\r", ""] {
        let error = place.library.find(wrong).unwrap_err();
        assert!(matches!(error, Error::BadName { .. }), "{wrong}: {error}");
    }
}

#[test]
fn a_name_without_owner_cannot_be_pulled() {
    let hub = Hub::start(two_quants(), |_, _| Answer::Usual);
    let error = Place::new().pull(&hub, "llama3.2").unwrap_err();
    assert!(matches!(error, Error::NoOwner { .. }), "{error}");
    assert!(hub.requests().is_empty());
}

#[test]
fn copies_share_files_until_the_last_name_goes() {
    let hub = Hub::start(two_quants(), |_, _| Answer::Usual);
    let place = Place::new();
    let first = place.pull(&hub, "o/r:Q8_0").unwrap();
    let second = place.library.copy("o/r", "mine:one").unwrap();
    assert_eq!((&first.path, &first.digest), (&second.path, &second.digest));
    assert!(matches!(place.library.copy("o/r", "mine:one"), Err(Error::Exists { .. })));
    assert_eq!(files(&place).len(), 1);
    place.library.remove("o/r:Q8_0").unwrap();
    assert_eq!(fs::read(place.library.find("mine").unwrap().path).unwrap(), bytes(3000));
    place.library.remove("mine:one").unwrap();
    assert!(files(&place).is_empty() && names(&place).is_empty());
    let error = place.library.remove("mine:one").unwrap_err();
    assert!(error.is_not_found(), "{error}");
}

#[test]
fn a_removed_pull_leaves_nothing() {
    let hub = Hub::start(two_quants(), |_, before| match before {
        0 => Answer::Usual,
        _ => Answer::Status(404, ""),
    });
    let place = Place::new();
    place.pull(&hub, "o/r:Q8_0").unwrap_err();
    assert_eq!(files(&place).len(), 2);
    place.library.remove("o/r").unwrap();
    assert!(files(&place).is_empty());
    assert!(place.library.list().unwrap().unfinished.is_empty());
}

#[test]
fn a_changed_repository_replaces_the_files_and_keeps_the_same_ones() {
    let weights = Served::large("model.safetensors", bytes(3000));
    let with = |config: &str| vec![weights.clone(), Served::small("config.json", config)];
    let place = Place::new();
    let first = place.pull(&Hub::start(with("{}"), |_, _| Answer::Usual), "o/r").unwrap();
    assert_eq!(first.path.file_name().unwrap(), "r");
    let hub = Hub::start(with("{ }"), |_, _| Answer::Usual);
    let second = place.pull(&hub, "o/r").unwrap();
    assert_ne!(first.path, second.path);
    assert_eq!(fs::read_to_string(second.path.join("config.json")).unwrap(), "{ }");
    assert_eq!(fs::read(second.path.join("model.safetensors")).unwrap(), bytes(3000));
    assert_eq!(hub.downloads().len(), 1, "only the changed file is downloaded");
    assert_eq!(files(&place).len(), 2);
}

#[test]
fn damaged_manifests_do_not_hide_the_others() {
    let hub = Hub::start(two_quants(), |_, _| Answer::Usual);
    let place = Place::new();
    let entry = place.pull(&hub, "o/r:Q8_0").unwrap();
    place.pull(&hub, "o/r:Q4_K_M").unwrap();
    let manifests = place.library.folder().join("manifests");
    let file = manifests.join("o%2Fr%3AQ8_0.json");
    let sound = fs::read_to_string(&file).unwrap();
    let outside = place.folder.path().join("outside.gguf");
    fs::write(&outside, bytes(3000)).unwrap();
    for damage in [
        String::new(),
        "{".into(),
        "[]".into(),
        sound.replace("\"version\": 1", "\"version\": 2"),
        sound.replace("m-Q8_0.gguf", "../../../outside.gguf"),
        sound.replace("m-Q8_0.gguf", outside.to_str().unwrap()),
        sound.replace("\"size\": 3000", "\"size\": 1"),
        sound.replace("\"o/r\"", "\"../r\""),
        sound.replace("o/r:Q8_0", "o/r:Q4_K_M"),
    ] {
        assert_ne!(damage, sound);
        fs::write(&file, &damage).unwrap();
        let listing = place.library.list().unwrap();
        assert_eq!(listing.entries.len(), 1, "{damage}");
        assert_eq!(listing.damaged.len(), 1, "{damage}");
        let error = place.library.find("o/r:Q8_0").unwrap_err();
        assert!(matches!(error, Error::Damaged { .. }), "{error}");
    }
    // A new pull repairs the manifest and needs no download.
    let before = hub.downloads().len();
    place.pull(&hub, "o/r:Q8_0").unwrap();
    assert_eq!(hub.downloads().len(), before);
    assert_eq!(names(&place), ["o/r:Q4_K_M", "o/r:Q8_0"]);
    // A link that leads out of the library is not followed.
    fs::remove_file(&entry.path).unwrap();
    std::os::unix::fs::symlink(&outside, &entry.path).unwrap();
    let error = place.library.find("o/r:Q8_0").unwrap_err().to_string();
    assert!(error.contains("outside the library"), "{error}");
    fs::remove_file(&entry.path).unwrap();
    assert_eq!(place.library.list().unwrap().damaged.len(), 1);
    place.library.remove("o/r:Q8_0").unwrap();
    assert_eq!(names(&place), ["o/r:Q4_K_M"]);
    assert_eq!(fs::read(&outside).unwrap(), bytes(3000));
}

#[test]
fn an_empty_library_is_no_error() {
    let place = Place::new();
    assert!(place.library.list().unwrap().entries.is_empty());
    assert!(!place.library.folder().exists());
}
