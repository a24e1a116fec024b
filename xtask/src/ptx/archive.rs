//! The two files that `cargo xtask ptx` writes: the compressed PTX of all modules, and a manifest. The manifest is
//! text, so that a difference between two versions is readable.
//!
//! Every module is a separate zstd frame, because a session needs about ten of the modules. Kernels of one source
//! resemble each other, so the longest PTX of a source is the base of the others: their frames refer to its text.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use super::manifest::Module;

const LEVEL: i32 = 19;
/// A base and a module must fit into the window of 4 MiB together, so that a frame can refer to all of the base.
const WINDOW_LOG: u32 = 22;

const HEADER: &str = "\
# Written by `cargo xtask ptx`, one line per module in the order of their frames in ptx.zst: name, architecture, SHA-256 of the
# sources and options, SHA-256 of the PTX, bytes of PTX, the module that the frame refers to (or `-`), bytes of the frame.
";

/// One compiled module.
pub struct Compiled<'a> {
    pub module: &'a Module,
    /// See [`super::manifest::hash`].
    pub source_hash: String,
    /// Output of [`strip`].
    pub ptx: String,
}

/// The archive and its manifest.
pub struct Files {
    pub archive: Vec<u8>,
    pub manifest: String,
}

/// The part of a manifest line that can be compared without compressing.
#[derive(PartialEq, Eq, Debug)]
pub struct Line {
    pub name: String,
    pub architecture: String,
    pub source_hash: String,
    pub ptx_hash: String,
    pub bytes: usize,
}

impl Compiled<'_> {
    pub fn line(&self) -> Line {
        Line {
            name: self.module.name.clone(),
            architecture: self.module.architecture.clone(),
            source_hash: self.source_hash.clone(),
            ptx_hash: sha256(self.ptx.as_bytes()),
            bytes: self.ptx.len(),
        }
    }
}

/// A parsed manifest.
pub struct Manifest {
    /// Version of the compiler.
    pub compiler: String,
    pub archive_hash: String,
    pub lines: Vec<Line>,
}

impl Manifest {
    pub fn parse(text: &str) -> Result<Manifest> {
        let mut manifest =
            Manifest { compiler: String::new(), archive_hash: String::new(), lines: Vec::new() };
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words[..] {
                ["nvrtc", version] => manifest.compiler = version.to_owned(),
                ["archive", hash] => manifest.archive_hash = hash.to_owned(),
                [name, architecture, source_hash, ptx_hash, bytes, _, _] => {
                    manifest.lines.push(Line {
                        name: name.to_owned(),
                        architecture: architecture.to_owned(),
                        source_hash: source_hash.to_owned(),
                        ptx_hash: ptx_hash.to_owned(),
                        bytes: bytes.parse().with_context(|| line.to_owned())?,
                    });
                }
                _ => bail!("not a line of the PTX manifest: {line}"),
            }
        }
        Ok(manifest)
    }
}

/// Returns the PTX without the compiler's comments and empty lines. Instructions for newer GPUs, which the loader
/// uncovers, are also comments but are kept. The first line names the module and its sources for the emulated driver.
pub fn strip(module: &Module, source_hash: &str, ptx: &str) -> String {
    let mut text = format!("// {} {source_hash}\n", module.name);
    for line in ptx.lines().map(str::trim_end).filter(|line| !line.is_empty()) {
        let bare = line.trim_start();
        if !bare.starts_with("//") || bare.starts_with("// 90: ") {
            text.push_str(line);
            text.push('\n');
        }
    }
    text
}

/// Compresses all modules. The same modules give the same bytes.
pub fn build(compiler: &str, modules: &[Compiled]) -> Result<Files> {
    let bases = bases(modules);
    let mut archive = Vec::new();
    let mut lines = String::new();
    for compiled in modules {
        let base = bases[compiled.module.source.as_str()];
        let own = std::ptr::eq(base, compiled);
        let frame = compress(&compiled.ptx, if own { "" } else { &base.ptx })
            .with_context(|| format!("compressing {}", compiled.module.name))?;
        let line = compiled.line();
        let base = if own { "-" } else { &base.module.name };
        let Line { name, architecture, source_hash, ptx_hash, bytes } = line;
        let stored = frame.len();
        writeln!(lines, "{name} {architecture} {source_hash} {ptx_hash} {bytes} {base} {stored}")?;
        archive.extend(frame);
    }
    let hash = sha256(&archive);
    let manifest = format!("{HEADER}nvrtc {compiler}\narchive {hash}\n{lines}");
    Ok(Files { archive, manifest })
}

/// Returns the base of each source: the longest PTX, or the first of the longest.
fn bases<'a>(modules: &'a [Compiled<'a>]) -> BTreeMap<&'a str, &'a Compiled<'a>> {
    let mut bases = BTreeMap::new();
    for compiled in modules {
        let base = bases.entry(compiled.module.source.as_str()).or_insert(compiled);
        if compiled.ptx.len() > base.ptx.len() {
            *base = compiled;
        }
    }
    bases
}

fn compress(text: &str, base: &str) -> Result<Vec<u8>> {
    if text.len() + base.len() > 1 << WINDOW_LOG {
        bail!("{} bytes and a base of {} exceed the window", text.len(), base.len());
    }
    let mut encoder =
        zstd::stream::write::Encoder::with_ref_prefix(Vec::new(), LEVEL, base.as_bytes())?;
    encoder.window_log(WINDOW_LOG)?;
    encoder.long_distance_matching(true)?;
    encoder.set_pledged_src_size(Some(text.len() as u64))?;
    encoder.write_all(text.as_bytes())?;
    Ok(encoder.finish()?)
}

/// Returns the first half of the SHA-256 in hexadecimal. 128 bits tell versions apart and keep lines short.
pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module(name: &str, source: &str) -> Module {
        Module {
            name: name.to_owned(),
            source: source.to_owned(),
            architecture: "compute_80".to_owned(),
            options: Vec::new(),
        }
    }

    #[test]
    fn comments_go_and_hidden_instructions_stay() {
        let ptx = "//\n// Generated\n\n.version 8.4\n\t// 90: griddepcontrol.wait;\n\t// begin inline asm\n\tret;\n";
        assert_eq!(
            strip(&module("norm", "norm.cu"), "12ab", ptx),
            "// norm 12ab\n.version 8.4\n\t// 90: griddepcontrol.wait;\n\tret;\n"
        );
    }

    #[test]
    fn modules_refer_to_the_longest_of_their_source_and_bytes_repeat() {
        let listed = [module("a", "x.cu"), module("b", "x.cu"), module("c", "y.cu")];
        let text = |seed: u32| -> String {
            (0..500_u32)
                .map(|i| format!("add {} {};\n", i.wrapping_mul(2_654_435_761), seed * (i / 400)))
                .collect()
        };
        let texts = [text(1), text(1) + &text(2), text(3)];
        let compiled: Vec<Compiled> = listed
            .iter()
            .zip(&texts)
            .map(|(module, ptx)| Compiled { module, source_hash: "00".into(), ptx: ptx.clone() })
            .collect();
        let files = build("12.4", &compiled).unwrap();
        let again = build("12.4", &compiled).unwrap();
        assert_eq!((&files.archive, &files.manifest), (&again.archive, &again.manifest));

        let manifest = Manifest::parse(&files.manifest).unwrap();
        assert_eq!(manifest.compiler, "12.4");
        assert_eq!(manifest.archive_hash, sha256(&files.archive));
        assert_eq!(manifest.lines, compiled.iter().map(Compiled::line).collect::<Vec<_>>());
        let tails: Vec<(&str, usize)> = files
            .manifest
            .lines()
            .skip(4)
            .map(|line| {
                let mut words = line.rsplit(' ');
                let stored = words.next().unwrap().parse().unwrap();
                (words.next().unwrap(), stored)
            })
            .collect();
        assert_eq!([tails[0].0, tails[1].0, tails[2].0], ["b", "-", "-"]);
        assert!(tails[0].1 * 20 < tails[2].1, "a frame with a base is small: {tails:?}");
        assert_eq!(tails.iter().map(|(_, stored)| stored).sum::<usize>(), files.archive.len());
    }

    #[test]
    fn a_damaged_manifest_is_refused() {
        assert!(Manifest::parse("nvrtc 12.4\nwhat is this\n").is_err());
        assert!(Manifest::parse("a compute_80 0 0 many - 1\n").is_err());
    }
}
