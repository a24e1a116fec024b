//! Terms that this project no longer uses, and what to write instead. CONTRIBUTING.md explains why.

use super::Finding;
use super::files::{File, Repository};
use super::scan::RustSource;

/// Paths that the rule holds for: files, or folders with a slash at the end. To extend the rule, add a folder.
const HELD: &[&str] = &[
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/",
    "bench/",
    "fixtures/",
    "fuzz/",
    "models/",
    "crates/",
    "xtask/",
    "python/src/",
    "examples/",
    "packaging/",
];

/// Paths with the texts that users read: pages, help and messages.
const TEXTS: &[&str] =
    &["README.md", "docs/", "crates/forebay/src/", "python/src/", "examples/", "packaging/"];

/// Pages about the design, which users do not read.
const NOT_TEXTS: &[&str] = &["docs/design/"];

/// Records keep the words of their day, and this file must name what it forbids.
const EXEMPT: &[&str] = &["bench/results/", "xtask/src/tidy/terms.rs"];

/// The one sentence in which the project's name is explained.
const TAGLINE: &str = "basin that holds water";

/// A term to avoid.
struct Term {
    /// Spellings in lower case, each one or more whole words.
    spellings: &'static [&'static str],
    instead: &'static str,
    /// Forbidden in prose: pages, comments and literals.
    in_prose: bool,
    /// Forbidden as an identifier or as a part of one.
    in_identifiers: bool,
    /// Forbidden in the texts that users read, but not elsewhere.
    in_texts_only: bool,
}

/// Creates a term to avoid everywhere.
const fn word(spellings: &'static [&'static str], instead: &'static str) -> Term {
    Term { spellings, instead, in_prose: true, in_identifiers: true, in_texts_only: false }
}

/// Creates a term to avoid in prose.
const fn phrase(spellings: &'static [&'static str], instead: &'static str) -> Term {
    Term { spellings, instead, in_prose: true, in_identifiers: false, in_texts_only: false }
}

/// Creates a term to avoid in the texts that users read.
const fn text(spellings: &'static [&'static str], instead: &'static str) -> Term {
    Term { spellings, instead, in_prose: true, in_identifiers: false, in_texts_only: true }
}

/// Creates a term to avoid in names.
const fn name(spellings: &'static [&'static str], instead: &'static str) -> Term {
    Term { spellings, instead, in_prose: false, in_identifiers: true, in_texts_only: false }
}

const TERMS: &[Term] = &[
    word(&["basin", "basins"], "weight cache, or RAM budget"),
    word(&["recast", "recasts", "recasting"], "relayout, or convert"),
    word(&["wave", "waves"], "pass, or chunk"),
    word(&["scout", "scouts"], "page-cache probe"),
    word(&["mover", "movers"], "copy thread"),
    word(&["guess", "guesses", "guessed", "guessing"], "prediction, or prefetch"),
    word(&["drizzle", "showers"], "fault profile: Intermittent, Outage"),
    // A model may be asked about the weather.
    name(&["weather"], "fault profile"),
    name(
        &["helprates", "cpuhelp", "helpargs", "streamedunits", "unitrates", "activationplaces"],
        "CpuOffload..., sub-layer, ActivationLayout",
    ),
    phrase(
        &[
            "cpu help",
            "cpu helps",
            "cpu helped",
            "cpu helping",
            "cpu to help",
            "cpu's help",
            "cpu may help",
            "cpu can help",
            "with help",
            "without help",
        ],
        "CPU offload",
    ),
    phrase(&["by chance"], "uniform random routing"),
    phrase(&["driver's account"], "as reported by the driver"),
    phrase(
        &["home in ram", "homes in ram", "no home", "expert's home", "home for all", "has a home"],
        "RAM slot",
    ),
    phrase(
        &["streamed units", "resident units", "units in vram", "units outside", "cpu units"],
        "sub-layers",
    ),
    phrase(
        &[
            "who comes",
            "who goes",
            "who stays",
            "who leaves",
            "who is there",
            "whoever",
            "whomever",
            "somebody",
            "somebody's",
            "nobody else",
        ],
        "the actor's name: caller, evicted expert, CPU worker, prefetcher",
    ),
    phrase(&["always have a place", "always has a place"], "the invariant itself"),
    phrase(
        &["neither all", "holds neither", "hold neither"],
        "VRAM and RAM together hold part of the experts",
    ),
    text(&["so many"], "the number: N requests, this many bytes"),
    text(&["comes"], "the verb that is meant: is, arrives, passes, belongs"),
    text(&["goes on", "go on", "going on", "went on"], "continues, or resumes"),
    text(&["behind"], "after"),
    text(&["vmhwm"], "memory, or RAM"),
];

pub fn check(repository: &Repository, findings: &mut Vec<Finding>) {
    for file in repository.files() {
        if starts_with_any(&file.path, HELD) && !starts_with_any(&file.path, EXEMPT) {
            check_file(file, findings);
        }
    }
}

/// Returns true if a path is one of these files or inside one of these folders.
fn starts_with_any(path: &str, places: &[&str]) -> bool {
    places.iter().any(|place| path == *place || place.ends_with('/') && path.starts_with(place))
}

fn check_file(file: &File, findings: &mut Vec<Finding>) {
    let Some(text) = file.text.as_deref() else { return };
    let ends = |endings: &[&str]| endings.iter().any(|ending| file.path.ends_with(ending));
    if ends(&[".md", ".sh", ".py", ".toml"]) {
        check_prose(&file.path, text, findings);
    } else if ends(&[".rs", ".cu", ".cuh", ".c", ".h", ".cpp"]) {
        let source = RustSource::new(&file.path, text);
        check_prose(&file.path, &prose_of(&source), findings);
        check_identifiers(&file.path, &source.code, findings);
    }
}

/// Returns the comments and literals of a source file. Code is blank, and lines keep their numbers.
fn prose_of(source: &RustSource) -> String {
    let keep = |(text, code): (u8, u8)| if text == code && text != b'\n' { b' ' } else { text };
    let bytes = source.text.bytes().zip(source.code.bytes()).map(keep).collect();
    String::from_utf8(bytes).unwrap_or_default()
}

/// One word of prose with its line. It is empty for code such as a path, a flag or `a::b`.
struct Word {
    line: usize,
    text: String,
}

fn check_prose(path: &str, text: &str, findings: &mut Vec<Finding>) {
    let words: Vec<Word> = text
        .lines()
        .enumerate()
        .filter(|(_, line)| !line.contains(TAGLINE))
        .flat_map(|(index, line)| {
            line.split_whitespace()
                .flat_map(words_of)
                .map(move |text| Word { line: index + 1, text })
        })
        .collect();
    let is_text = starts_with_any(path, TEXTS) && !starts_with_any(path, NOT_TEXTS);
    let holds = |term: &&Term| term.in_prose && (is_text || !term.in_texts_only);
    for term in TERMS.iter().filter(holds) {
        for spelling in term.spellings {
            let wanted: Vec<&str> = spelling.split(' ').collect();
            for window in words.windows(wanted.len()) {
                if window.iter().zip(&wanted).all(|(word, wanted)| word.text == *wanted) {
                    let message = format!("\"{spelling}\": write {}", term.instead);
                    findings.push(Finding::fail(path, window[0].line, message));
                }
            }
        }
    }
}

/// Returns the words of a piece of text without blanks, in lower case. A piece of code is one empty word, so that no
/// phrase reaches across it. A piece without letters or digits, such as a comment marker, has no words.
fn words_of(piece: &str) -> Vec<String> {
    let piece = piece.trim_matches(|c: char| !c.is_alphanumeric() && c != '-');
    if piece.is_empty() || piece.chars().all(|c| c == '-') {
        return Vec::new();
    }
    let is_code = piece.starts_with('-')
        || piece.contains(['_', '/', '=', '\\', '$', '{'])
        || piece.contains("::")
        || piece.contains('.');
    if is_code {
        return vec![String::new()];
    }
    let separates = |c: char| !c.is_alphanumeric() && c != '\'' && c != '’';
    piece
        .split(separates)
        .filter(|word| !word.is_empty())
        .map(|word| word.to_lowercase().replace('’', "'"))
        .collect()
}

fn check_identifiers(path: &str, code: &str, findings: &mut Vec<Finding>) {
    for (index, line) in code.lines().enumerate() {
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
        for identifier in line.split(|c| !is_part(c)).filter(|word| !word.is_empty()) {
            let whole = identifier.to_lowercase();
            let parts = parts_of(identifier);
            for term in TERMS.iter().filter(|term| term.in_identifiers) {
                let is_term = |part: &String| term.spellings.contains(&part.as_str());
                if term.spellings.contains(&whole.as_str()) || parts.iter().any(is_term) {
                    let message = format!("the name {identifier}: write {}", term.instead);
                    findings.push(Finding::fail(path, index + 1, message));
                }
            }
        }
    }
}

/// Returns the words of an identifier in lower case: `GuessRate` and `guess_rate` are both guess and rate.
fn parts_of(identifier: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut was_lower = false;
    for c in identifier.chars() {
        if c == '_' || c.is_ascii_uppercase() && was_lower {
            parts.push(String::new());
        }
        was_lower = c.is_ascii_lowercase();
        if c != '_'
            && let Some(part) = parts.last_mut()
        {
            part.push(c.to_ascii_lowercase());
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_text(path: &str, text: &str) -> Vec<(usize, String)> {
        let repository = Repository::from_texts(&[(path, text)]);
        let mut findings = Vec::new();
        check(&repository, &mut findings);
        findings.into_iter().map(|finding| (finding.line, finding.message)).collect()
    }

    #[test]
    fn a_term_to_avoid_fails_with_its_line_and_what_to_write() {
        let found = check_text("README.md", "Weights pass\nthrough a Basin.\n");
        assert_eq!(found, [(2, "\"basin\": write weight cache, or RAM budget".to_owned())]);
        assert_eq!(check_text("docs/a.md", "while the CPU\nhelps, twice")[0].0, 1);
        assert_eq!(check_text("bench/a.sh", "# a guess-based start, whoever asks").len(), 2);
    }

    #[test]
    fn some_words_are_only_for_other_readers() {
        for path in ["README.md", "docs/server.md", "crates/forebay/src/help.rs", "examples/a.rs"] {
            let found =
                check_text(path, "/// Answer so many requests,\n// the pull goes on behind it\n");
            assert_eq!(found.len(), 3, "{path}: {found:?}");
        }
        for path in ["docs/design/plans.md", "crates/forebay-kv/src/lib.rs"] {
            assert!(check_text(path, "// so many requests, behind it\n").is_empty(), "{path}");
        }
    }

    #[test]
    fn words_with_another_meaning_pass() {
        for text in [
            "the basin that holds water right before the turbine",
            "`--help`, the home directory, a unit test, units of GB/s",
            "`forebay replay T --guesses 4`, `src/recast.rs`, `guess_rate`",
            "recasted, waveform, guesswork, the weather in Paris",
        ] {
            assert_eq!(check_text("README.md", text), [], "{text}");
        }
    }

    #[test]
    fn only_the_listed_paths_are_held() {
        for path in ["bench/results/a.md", "elsewhere/a.md", "README.md.old"] {
            assert_eq!(check_text(path, "a basin"), [], "{path}");
        }
    }

    #[test]
    fn in_sources_comments_literals_and_names_count() {
        let source = "// a wave\nlet message = \"the guess\";\nstruct GuessRate;\nfn no_wave_now() {}\n\
                      fn waveform() {} // fine\nstruct CpuHelp;\n\
                      struct Weather;\n";
        let lines: Vec<usize> =
            check_text("docs/a.rs", source).into_iter().map(|(line, _)| line).collect();
        assert_eq!(lines, [1, 2, 3, 4, 6, 7]);
    }
}
