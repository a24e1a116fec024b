//! Recognises a file that is not a model from its first bytes.

use std::io::Read as _;
use std::path::Path;

use crate::Storage;

/// Number of bytes to read, enough for every signature below.
const HEAD_BYTES: u64 = 512;

const LFS_POINTER: &[u8] = b"version https://git-lfs";

/// Describes what the file at `path` seems to be, and what the user can do about it.
pub(crate) fn describe(storage: &dyn Storage, path: &Path) -> String {
    let mut head = Vec::new();
    match storage.open(path).and_then(|(file, _)| file.take(HEAD_BYTES).read_to_end(&mut head)) {
        Ok(_) => of_head(&head).to_owned(),
        // The caller read the file a moment ago.
        Err(_) => "it cannot be read again".to_owned(),
    }
}

fn of_head(head: &[u8]) -> &'static str {
    let begins = |with: &[u8]| head.starts_with(with);
    if head.is_empty() {
        "the file is empty: download it again"
    } else if begins(LFS_POINTER) {
        "it is a Git LFS pointer, which stands for the file: run git lfs pull, or download the file itself"
    } else if is_web_page(head) {
        "it is a web page: the download gave a page instead of the file (a login or a licence may be needed): download it again"
    } else if begins(b"PK\x03\x04") {
        "it is a zip archive, perhaps a PyTorch checkpoint (.bin, .pt): convert it to GGUF or safetensors"
    } else if begins(b"\x80\x02") || begins(b"\x80\x04") {
        "it is a Python pickle, perhaps a PyTorch checkpoint: convert it to GGUF or safetensors"
    } else if is_safetensors(head) {
        "it is a safetensors file: name the folder that it is in, with its config.json"
    } else if [b"lmgg", b"fmgg", b"tjgg", b"algg"].iter().any(|magic| begins(*magic)) {
        "it is a GGML file, the format before GGUF: download the model as GGUF"
    } else if begins(b"\x1f\x8b") || begins(b"\x28\xb5\x2f\xfd") || begins(b"7z\xbc\xaf") {
        "it is compressed: unpack it first"
    } else if head.len() >= 16 && head.iter().all(|&byte| byte == 0) {
        "it begins with zeros: the download did not end; download it again"
    } else if std::str::from_utf8(head).is_ok_and(|text| !text.contains('\0')) {
        "it is text"
    } else {
        "it begins otherwise: check that it is the right file and that its download ended"
    }
}

fn is_web_page(head: &[u8]) -> bool {
    let text = String::from_utf8_lossy(head).trim_start().to_ascii_lowercase();
    ["<!doctype html", "<html", "<?xml"].iter().any(|start| text.starts_with(start))
}

/// Returns true if `head` is a length of eight bytes followed by JSON.
fn is_safetensors(head: &[u8]) -> bool {
    let Some((length, json)) = head.split_first_chunk::<8>() else { return false };
    json.starts_with(b"{\"") && u64::from_le_bytes(*length) < 1 << 32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usual_mistakes_are_recognised() {
        let mut safetensors = 60_u64.to_le_bytes().to_vec();
        safetensors.extend(b"{\"__metadata__\": {}}");
        for (head, wanted) in [
            (&b""[..], "empty"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS"),
            (b"\n<!DOCTYPE html><html>", "web page"),
            (b"PK\x03\x04\x00\x00", "PyTorch"),
            (b"\x80\x02}q\x00", "pickle"),
            (&safetensors, "safetensors"),
            (b"tjgg\x03\x00\x00\x00", "GGML"),
            (b"\x1f\x8b\x08\x00", "compressed"),
            (&[0; 64], "zeros"),
            (b"some words", "text"),
            (b"\xff\x00\x12", "right file"),
        ] {
            assert!(of_head(head).contains(wanted), "{head:?}: {}", of_head(head));
        }
    }
}
