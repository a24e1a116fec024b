//! Fetches the packages of other programs and reads the names that they know.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};

use super::configurations::Configurations;
use super::python::{Token, dictionary, ordered_pairs, tokens};
use super::record::{Names, Record};

const GGUF: &str = "gguf";
const LLAMA_CPP: &str = "llama-cpp-python";
const TRANSFORMERS: &str = "transformers";

/// Tables of transformers whose models write text.
const TEXT_MODELS: [&str; 2] =
    ["MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"];

/// Fetches the newest packages into a folder, which is emptied before, and returns their names.
///
/// # Errors
/// Returns an error if pip fails, or if a package has no table of names where one is expected.
pub fn fetch(folder: &Path) -> Result<Record> {
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let mut packages = BTreeMap::new();
    for package in [GGUF, LLAMA_CPP, TRANSFORMERS] {
        packages.insert(package.to_owned(), download(package, &folder.join(package))?);
    }
    let date = printed(Command::new("date").args(["-u", "+%F"]))?;
    let gguf = gguf_names(&folder.join(GGUF), &folder.join(LLAMA_CPP))?;
    let model_types = model_types(&folder.join(TRANSFORMERS))?;
    Ok(Record { date: date.trim().to_owned(), packages, gguf, model_types })
}

/// Downloads a package, unpacks it into a folder and returns its version.
fn download(package: &str, folder: &Path) -> Result<String> {
    eprintln!("fetching {package}");
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]);
    if package == LLAMA_CPP {
        // Only its sources have the names.
        pip.args(["--no-binary", package]);
    }
    printed(pip.arg("--dest").arg(folder).arg(package))?;
    let archive = match &files(folder)?[..] {
        [archive] => archive.clone(),
        others => bail!("{package}: pip fetched {} files instead of one", others.len()),
    };
    let name = archive.file_name().unwrap_or_default().to_string_lossy().into_owned();
    if name.ends_with(".tar.gz") {
        printed(Command::new("tar").arg("-xzf").arg(&archive).arg("-C").arg(folder))?;
    } else {
        let mut zip = Command::new("python3");
        printed(zip.args(["-m", "zipfile", "-e"]).arg(&archive).arg(folder))?;
    }
    version(&name).with_context(|| format!("{name}: has no version"))
}

/// Returns the version in the name of a package's file, such as `name-1.2.tar.gz` or `name-1.2-py3-none-any.whl`.
fn version(file: &str) -> Option<String> {
    let rest = file.split_once('-')?.1;
    let version = rest.strip_suffix(".tar.gz").or_else(|| Some(rest.split_once('-')?.0))?;
    (!version.is_empty()).then(|| version.to_owned())
}

/// Returns the names of GGUF architectures in the package `gguf` and in llama.cpp, whose sources have a newer `gguf`.
fn gguf_names(gguf: &Path, llama_cpp: &Path) -> Result<Names> {
    let mut names = Names::new();
    for folder in [gguf, llama_cpp] {
        let source = read_one(folder, "gguf/constants.py")?;
        for (name, experts) in names_of_constants(&source)? {
            *names.entry(name).or_default() |= experts;
        }
    }
    let source = read_one(llama_cpp, "src/llama-arch.cpp")?;
    for name in names_of_llama_cpp(&source)? {
        names.entry(name).or_default();
    }
    Ok(names)
}

/// Returns the names in `gguf/constants.py`. Those whose list of tensors has routed experts have experts.
fn names_of_constants(source: &str) -> Result<Names> {
    let names = dictionary(source, "MODEL_ARCH_NAMES").context("gguf: no MODEL_ARCH_NAMES")?;
    let tensors = dictionary(source, "MODEL_TENSORS").context("gguf: no MODEL_TENSORS")?;
    let is_expert = |token: &Token| match token {
        Token::Word(name) => is_expert_tensor(name),
        _ => false,
    };
    let mut found = Names::new();
    for (key, value) in names {
        let [Token::Text(name)] = &value[..] else { bail!("gguf: {key} is no text") };
        let experts = tensors.get(&key).is_some_and(|tensors| tensors.iter().any(is_expert));
        found.insert(name.clone(), experts);
    }
    ensure!(found.values().any(|experts| *experts), "gguf: no tensors of experts");
    Ok(found)
}

/// Returns true for weights of routed experts, such as `MODEL_TENSOR.FFN_UP_EXP`, but not `FFN_UP_SHEXP`.
fn is_expert_tensor(name: &str) -> bool {
    let name = name.strip_prefix("MODEL_TENSOR.").unwrap_or(name);
    name.starts_with("FFN_") && (name.ends_with("_EXP") || name.ends_with("_EXPS"))
}

/// Returns the names in `llama-arch.cpp`: lines such as `{ LLM_ARCH_LLAMA, "llama" },`.
fn names_of_llama_cpp(source: &str) -> Result<BTreeSet<String>> {
    let lines = source.lines().skip_while(|line| !line.contains("LLM_ARCH_NAMES = {"));
    let lines = lines.skip(1).take_while(|line| !line.starts_with('}'));
    let mut names = BTreeSet::new();
    for line in lines {
        if let [Token::Open('{'), Token::Word(key), Token::Sign(','), Token::Text(name), ..] =
            &tokens(line)[..]
            && key.starts_with("LLM_ARCH_")
            && key != "LLM_ARCH_UNKNOWN"
        {
            names.insert(name.clone());
        }
    }
    ensure!(!names.is_empty(), "llama.cpp: no LLM_ARCH_NAMES");
    Ok(names)
}

/// Returns the model types of language models in transformers, alone or inside models with images.
fn model_types(folder: &Path) -> Result<Names> {
    let models = read_one(folder, "models/auto/modeling_auto.py")?;
    let classes = read_one(folder, "models/auto/auto_mappings.py")?;
    let mut classes = ordered_pairs(&classes, "CONFIG_MAPPING_NAMES")
        .context("transformers: no CONFIG_MAPPING_NAMES")?;
    // transformers adds this one beside the table.
    classes.entry("gpt-sw3".to_owned()).or_insert_with(|| "GPT2Config".to_owned());
    let mut configurations = Configurations::default();
    for path in all_files(folder)? {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.starts_with("configuration_") && name.ends_with(".py") {
            let source = fs::read_to_string(&path);
            configurations.add(&source.with_context(|| path.display().to_string())?);
        }
    }
    let mut names = Names::new();
    for table in TEXT_MODELS {
        let table =
            ordered_pairs(&models, table).with_context(|| format!("transformers: no {table}"))?;
        for model_type in table.keys() {
            let class = classes.get(model_type);
            let found =
                class.and_then(|class| configurations.language_model(model_type, class, &classes));
            let (name, experts) = found.with_context(|| {
                format!("transformers: the configuration of {model_type} is not found")
            })?;
            *names.entry(name).or_default() |= experts;
        }
    }
    ensure!(names.values().any(|experts| *experts), "transformers: no models with experts");
    Ok(names)
}

/// Returns the text of the only file in a folder whose path has this end.
fn read_one(folder: &Path, end: &str) -> Result<String> {
    let mut found = all_files(folder)?;
    found.retain(|path| path.ends_with(end));
    match &found[..] {
        [path] => fs::read_to_string(path).with_context(|| path.display().to_string()),
        _ => bail!("{}: has {} files {end} instead of one", folder.display(), found.len()),
    }
}

/// Returns the files in a folder and its folders.
fn all_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for path in files(folder)? {
        if path.is_dir() { found.extend(all_files(&path)?) } else { found.push(path) }
    }
    Ok(found)
}

fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}

/// Runs a command and returns what it prints.
fn printed(command: &mut Command) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("cannot start {program}"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} failed: {}", errors.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_in_the_names_of_files() {
        assert_eq!(version("gguf-0.19.0-py3-none-any.whl").as_deref(), Some("0.19.0"));
        assert_eq!(version("llama_cpp_python-0.3.36.tar.gz").as_deref(), Some("0.3.36"));
        assert_eq!(version("gguf.whl"), None);
    }

    #[test]
    fn routed_experts_are_told_from_shared_ones() {
        let source = "MODEL_ARCH_NAMES: dict[MODEL_ARCH, str] = {\n    MODEL_ARCH.A: \"a\", # dummy\n    MODEL_ARCH.B: \"b-moe\",\n    \
                      MODEL_ARCH.C: \"c\",\n}\nMODEL_TENSORS: dict[MODEL_ARCH, list[MODEL_TENSOR]] = {\n    MODEL_ARCH.A: [\n        \
                      MODEL_TENSOR.FFN_UP_SHEXP,\n        MODEL_TENSOR.V_ENC_MSFA_EXP,\n    ],\n    MODEL_ARCH.B: [\n        \
                      # [q|gate]\n        MODEL_TENSOR.FFN_UP_EXP,\n    ],\n}\n";
        let expected = [("a", false), ("b-moe", true), ("c", false)];
        let expected = expected.map(|(name, experts)| (name.to_owned(), experts));
        assert_eq!(names_of_constants(source).unwrap(), Names::from(expected));
        assert!(names_of_constants(&source.replace("UP_EXP,", "UP,")).is_err());
        assert!(names_of_constants("").is_err());
    }

    #[test]
    fn names_of_llama_cpp_end_with_their_table() {
        let source = "static const std::map<llm_arch, const char *> LLM_ARCH_NAMES = {\n    { LLM_ARCH_CLIP, \"clip\" }, // dummy\n    \
                      { LLM_ARCH_A, \"a\" },\n    { LLM_ARCH_UNKNOWN, \"(unknown)\" },\n};\n    { LLM_ARCH_B, \"b\" },\n";
        let names = names_of_llama_cpp(source).unwrap();
        assert_eq!(names.iter().collect::<Vec<_>>(), ["a", "clip"]);
        assert!(names_of_llama_cpp("").is_err());
    }
}
