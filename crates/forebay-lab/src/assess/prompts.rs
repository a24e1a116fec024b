//! The texts that a model is assessed on: those that ship with the project, or the user's own.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use forebay_format::at_most;
use serde::{Deserialize, Serialize};

/// Use of a text as a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PromptKind {
    /// The model continues the text as it is.
    #[default]
    Completion,
    /// The text is a user message. It is put into the model's chat template, if the model has one.
    Chat,
}

/// One prompt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prompt {
    /// Name of the domain. Results are also reported for each domain alone.
    #[serde(default = "own_domain")]
    pub domain: String,
    /// Natural or programming language, for the reader of the report.
    #[serde(default)]
    pub language: String,
    #[serde(default)]
    pub kind: PromptKind,
    pub text: String,
}

/// Returns the domain of prompts that name none.
fn own_domain() -> String {
    "prompts".to_owned()
}

/// Reasons why no prompts can be read from a file.
#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    #[error("{}: {source}", path.display())]
    Unreadable { path: PathBuf, source: std::io::Error },
    #[error(
        "{}: more than {}: give fewer or shorter prompts",
        path.display(),
        at_most(PROMPT_FILE_BYTES_MAX)
    )]
    TooLong { path: PathBuf },
    #[error("{}: is not UTF-8 text", path.display())]
    NotText { path: PathBuf },
    #[error("{}: prompt {number}: {why}", path.display())]
    Prompt { path: PathBuf, number: usize, why: String },
    #[error(
        "{}: holds no prompts: write one JSON object per line, as in {{\"domain\": \"law\", \"text\": \"...\"}}, \
         or plain texts with a line --- between them",
        path.display()
    )]
    Empty { path: PathBuf },
    #[error("{}: {count} {what}, at most {most} can be told apart in a report", path.display())]
    TooMany { path: PathBuf, what: &'static str, count: usize, most: usize },
}

/// Size limit of a prompt file in bytes.
pub const PROMPT_FILE_BYTES_MAX: u64 = 16 << 20;
const PROMPTS_MAX: usize = 4096;
const DOMAINS_MAX: usize = 24;
const NAME_CHARACTERS_MAX: usize = 40;

/// Returns the prompts that ship with the project: narrative, technical text, code, reasoning and dialogue, in several
/// languages. They were written for this project; licence MIT OR Apache-2.0.
///
/// # Panics
/// Never panics: a test reads all of them.
pub fn shipped() -> Vec<Prompt> {
    let lines = include_str!("prompts/shipped.jsonl").lines();
    lines
        .map(|line| serde_json::from_str(line).expect("a test reads the shipped prompts"))
        .collect()
}

/// Reads the user's prompts.
///
/// A file whose first character is `{` has one JSON object per line with the fields of [`Prompt`]; only `text` is
/// required. Any other file is plain text in which a line of three dashes ends a prompt.
///
/// # Errors
/// Returns an error if the file cannot be read, is too long, or has no prompts. If one prompt is invalid, the error has
/// its number, counted from 1.
pub fn read(path: &Path) -> Result<Vec<Prompt>, PromptError> {
    let path_buf = || path.to_path_buf();
    let unreadable = |source| PromptError::Unreadable { path: path_buf(), source };
    let file = std::fs::File::open(path).map_err(unreadable)?;
    let mut bytes = Vec::new();
    // Limits the bytes read, not the file size, because a pipe has no size.
    file.take(PROMPT_FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > PROMPT_FILE_BYTES_MAX {
        return Err(PromptError::TooLong { path: path_buf() });
    }
    let text = String::from_utf8(bytes).map_err(|_| PromptError::NotText { path: path_buf() })?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    let prompts = parse(text).map_err(|(number, why)| PromptError::Prompt {
        path: path_buf(),
        number,
        why,
    })?;
    let too_many = |what, count, most| PromptError::TooMany { path: path_buf(), what, count, most };
    if prompts.is_empty() {
        return Err(PromptError::Empty { path: path_buf() });
    }
    if prompts.len() > PROMPTS_MAX {
        return Err(too_many("prompts", prompts.len(), PROMPTS_MAX));
    }
    let domains = domains(&prompts).len();
    if domains > DOMAINS_MAX {
        return Err(too_many("domains", domains, DOMAINS_MAX));
    }
    Ok(prompts)
}

/// Returns each domain once, in the order of its first prompt.
pub fn domains(prompts: &[Prompt]) -> Vec<&str> {
    let mut names: Vec<&str> = Vec::new();
    for prompt in prompts {
        if !names.contains(&prompt.domain.as_str()) {
            names.push(&prompt.domain);
        }
    }
    names
}

fn parse(text: &str) -> Result<Vec<Prompt>, (usize, String)> {
    if !text.trim_start().starts_with('{') {
        return Ok(plain(text));
    }
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.enumerate().map(|(index, line)| one(line).map_err(|why| (index + 1, why))).collect()
}

fn one(line: &str) -> Result<Prompt, String> {
    let mut prompt: Prompt = serde_json::from_str(line).map_err(|error| error.to_string())?;
    if prompt.text.trim().is_empty() {
        return Err("its text is empty".to_owned());
    }
    for name in [&mut prompt.domain, &mut prompt.language] {
        // Names are printed to terminals and in tables, so control characters must not get through.
        *name = name.trim().chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
        if name.chars().count() > NAME_CHARACTERS_MAX {
            return Err(format!("a name of more than {NAME_CHARACTERS_MAX} characters"));
        }
    }
    if prompt.domain.is_empty() {
        prompt.domain = own_domain();
    }
    Ok(prompt)
}

fn plain(text: &str) -> Vec<Prompt> {
    let mut texts = vec![String::new()];
    for line in text.lines() {
        if line.trim_end() == "---" {
            texts.push(String::new());
        } else if let Some(open) = texts.last_mut() {
            open.push_str(line);
            open.push('\n');
        }
    }
    // Trailing white space would become a token of its own that the continuation cannot join.
    let texts = texts.iter().map(|text| text.trim_matches('\n').trim_end());
    let prompt = |text: &str| Prompt {
        domain: own_domain(),
        language: String::new(),
        kind: PromptKind::Completion,
        text: text.to_owned(),
    };
    texts.filter(|text| !text.trim().is_empty()).map(prompt).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(bytes: &[u8]) -> Result<Vec<Prompt>, PromptError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("prompts");
        std::fs::write(&path, bytes).unwrap();
        read(&path)
    }

    #[test]
    fn the_shipped_prompts_cover_domains_languages_and_kinds() {
        let prompts = shipped();
        assert_eq!(domains(&prompts), ["narrative", "technical", "code", "reasoning", "dialogue"]);
        for language in ["en", "de", "fr", "es", "zh", "python", "rust", "javascript", "c"] {
            assert!(prompts.iter().any(|prompt| prompt.language == language), "{language}");
        }
        assert!(prompts.iter().any(|prompt| prompt.kind == PromptKind::Chat));
        for prompt in prompts {
            let length = prompt.text.chars().count();
            assert!((150..1000).contains(&length), "{length}: {}", prompt.text);
        }
    }

    #[test]
    fn both_forms_are_read() {
        let plain = written(b"one\ntwo\n---\n\n---\nthree\n").unwrap();
        let texts: Vec<&str> = plain.iter().map(|prompt| prompt.text.as_str()).collect();
        assert_eq!(texts, ["one\ntwo", "three"]);
        assert_eq!((plain[0].domain.as_str(), plain[0].kind), ("prompts", PromptKind::Completion));

        let lines = written(
            b"\xef\xbb\xbf{\"text\": \"a\"}\n\n{\"text\": \"b\", \"domain\": \"law\\u001b[31m\", \"kind\": \"chat\"}",
        )
        .unwrap();
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[1].domain, "law\u{fffd}[31m");
        assert_eq!(domains(&lines), ["prompts", "law\u{fffd}[31m"]);
    }

    #[test]
    fn what_holds_no_prompts_is_refused() {
        let long = format!("{{\"text\": \"x\", \"domain\": \"{}\"}}", "d".repeat(41));
        let many: String =
            (0..25).map(|i| format!("{{\"text\":\"x\",\"domain\":\"{i}\"}}\n")).collect();
        let refused: [(&[u8], &str); 10] = [
            (b"", "no prompts"),
            (b"---\n---\n", "no prompts"),
            (b"\xff\xfe\x00", "UTF-8"),
            (b"{\"text\": \"x\"}\n{\"text\": ", "prompt 2"),
            (b"{\"text\": 1}", "prompt 1"),
            (b"{\"text\": \"  \"}", "empty"),
            (b"{\"txt\": \"x\"}", "txt"),
            (b"{\"text\": \"x\", \"kind\": \"song\"}", "song"),
            (long.as_bytes(), "40 characters"),
            (many.as_bytes(), "25 domains"),
        ];
        for (bytes, why) in refused {
            let error = written(bytes).unwrap_err().to_string();
            assert!(error.contains(why), "{why} is missing in: {error}");
        }
        assert!(written(&vec![b'x'; (PROMPT_FILE_BYTES_MAX + 1) as usize]).is_err());
        // JSON's own depth limit stops nested brackets before the stack overflows.
        let deep = format!("{{\"text\": {}", "[".repeat(1 << 20));
        assert!(written(deep.as_bytes()).is_err());
        assert!(read(Path::new("/no/such/file")).is_err());
    }
}
