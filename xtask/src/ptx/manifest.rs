//! The modules to compile. `kernels/modules.txt` has a line `NAME SOURCE ARCHITECTURE OPTION...` for each.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result, bail};

use super::archive::sha256;

/// One module to compile.
pub struct Module {
    pub name: String,
    /// A `.cu` file in the folder of kernels.
    pub source: String,
    /// Architecture, such as `compute_80`.
    pub architecture: String,
    /// Options for the compiler, including the architecture.
    pub options: Vec<String>,
}

pub fn read(kernels: &Path) -> Result<Vec<Module>> {
    let path = kernels.join("modules.txt");
    let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    parse(&text)
}

fn parse(text: &str) -> Result<Vec<Module>> {
    let mut modules: Vec<Module> = Vec::new();
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        if line.starts_with('#') {
            continue;
        }
        let mut words = line.split_whitespace().map(str::to_owned);
        let (Some(name), Some(source), Some(architecture)) =
            (words.next(), words.next(), words.next())
        else {
            bail!("modules.txt: expected `NAME SOURCE ARCHITECTURE OPTION...`, found `{line}`");
        };
        let mut options = vec![
            format!("--gpu-architecture={architecture}"),
            "--std=c++17".to_owned(),
            "--device-as-default-execution-space".to_owned(),
        ];
        options.extend(words);
        if modules.iter().any(|module| module.name == name) {
            bail!("modules.txt: {name} is there twice");
        }
        modules.push(Module { name, source, architecture, options });
    }
    Ok(modules)
}

/// Returns the hash that ties a module's PTX to its sources, options and compiler, in hexadecimal.
pub fn hash(kernels: &Path, module: &Module, version: &str) -> Result<String> {
    let mut all = Vec::new();
    let mut files = BTreeSet::new();
    collect(kernels, &module.source, &mut files)?;
    for file in &files {
        let text = std::fs::read(kernels.join(file))?;
        all.extend(format!("{file} {}\n", text.len()).into_bytes());
        all.extend(text);
    }
    all.extend(format!("{:?} {version}", module.options).into_bytes());
    Ok(sha256(&all))
}

/// Collects the file and all files that it includes by a name in quotation marks.
fn collect(kernels: &Path, file: &str, files: &mut BTreeSet<String>) -> Result<()> {
    if !files.insert(file.to_owned()) {
        return Ok(());
    }
    let text =
        std::fs::read_to_string(kernels.join(file)).with_context(|| format!("reading {file}"))?;
    for line in text.lines() {
        if let Some(rest) = line.trim().strip_prefix("#include \"") {
            collect(kernels, rest.split('"').next().unwrap_or_default(), files)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_lines() {
        let modules =
            parse("# why\n\nround a.cu compute_80 -DX=1\nother b.cu compute_90a\n").unwrap();
        assert_eq!(modules.len(), 2);
        assert_eq!((&*modules[0].name, &*modules[0].source), ("round", "a.cu"));
        assert!(modules[0].options.contains(&"-DX=1".to_owned()));
        assert!(parse("round a.cu").is_err());
        assert!(parse("a a.cu compute_80\na b.cu compute_80").is_err());
    }
}
