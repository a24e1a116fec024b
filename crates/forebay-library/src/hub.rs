//! The list of a repository's files, in the form of Hugging Face's hub.

use std::io::Read as _;
use std::sync::atomic::Ordering;

use serde::Deserialize;
use ureq::http::HeaderMap;

use crate::client::{Client, passing, shown};
use crate::manifest::{Checksum, RepositoryFile};
use crate::{Error, path};

/// Most pages of a list, and most bytes of a page.
const PAGES: usize = 1000;
const PAGE_BYTES: u64 = 16 << 20;

#[derive(Deserialize)]
struct Item {
    #[serde(rename = "type")]
    kind: String,
    path: String,
    #[serde(default)]
    size: u64,
    #[serde(default)]
    oid: String,
    lfs: Option<LargeFile>,
}

/// A file that the repository keeps outside of Git.
#[derive(Deserialize)]
struct LargeFile {
    oid: String,
    size: u64,
}

/// Lists all files of a repository.
pub fn list(
    client: &Client,
    repository: &str,
    revision: &str,
    stopped: &dyn Fn() -> bool,
) -> Result<Vec<RepositoryFile>, Error> {
    let revision = path::encode(revision, false);
    let first = format!(
        "{}/api/models/{}/tree/{revision}?recursive=true",
        client.endpoint,
        path::encode(repository, true)
    );
    let mut next = Some(first);
    let mut files = Vec::new();
    for _ in 0..PAGES {
        let Some(url) = next else { return Ok(files) };
        let (items, link) = client.retry(stopped, || {
            let mut response = client.get(&url, None)?;
            let link = next_page(response.headers());
            let mut text = Vec::new();
            let mut body = response.body_mut().as_reader().take(PAGE_BYTES);
            body.read_to_end(&mut text).map_err(|error| passing(&url, &error.to_string()))?;
            client.received_bytes.fetch_add(text.len() as u64, Ordering::Relaxed);
            let items: Vec<Item> = serde_json::from_slice(&text)
                .map_err(|error| Error::BadListing { url: shown(&url), why: error.to_string() })?;
            Ok((items, link))
        })?;
        if let Some(link) = link.as_ref().filter(|link| !client.is_own(link)) {
            let why = format!("it continues at another host, {}", shown(link));
            return Err(Error::BadListing { url: shown(&url), why });
        }
        for item in items.into_iter().filter(|item| item.kind == "file") {
            files.push(file(item)?);
        }
        next = link;
    }
    Err(Error::BadListing { url: client.endpoint.clone(), why: "it has too many pages".into() })
}

fn file(item: Item) -> Result<RepositoryFile, Error> {
    if let Err(why) = path::check(&item.path) {
        return Err(Error::BadPath { path: item.path, why });
    }
    let (size, checksum) = match item.lfs {
        Some(large) => {
            let digits = large.oid.strip_prefix("sha256:").unwrap_or(&large.oid);
            (large.size, Checksum::Sha256(digits.to_ascii_lowercase()))
        }
        None => (item.size, Checksum::GitSha1(item.oid.to_ascii_lowercase())),
    };
    if !checksum.is_sound() {
        let why = format!("{:?} has no checksum", item.path);
        return Err(Error::BadListing { url: String::from("the repository"), why });
    }
    Ok(RepositoryFile { path: item.path, size, checksum })
}

/// Returns the address of the next page: `Link: <URL>; rel="next"`.
fn next_page(headers: &HeaderMap) -> Option<String> {
    let links = headers.get_all("link").into_iter().filter_map(|value| value.to_str().ok());
    for link in links.flat_map(|value| value.split(',')) {
        let (url, rest) = link.trim().strip_prefix('<')?.split_once('>')?;
        if rest.replace(['"', ' '], "").split(';').any(|part| part == "rel=next") {
            return Some(url.to_owned());
        }
    }
    None
}
