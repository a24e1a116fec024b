//! Finds the files of a folder that make up a model, and opens them.

use std::collections::{BTreeMap, HashSet};
use std::io::Read;
use std::path::{Component, Path, PathBuf};

use serde_json::Value;

use super::json::parse_object;
use super::safetensors::parse_file;
use super::{ChatTemplates, Document, HfMetadata, TemplateSource};
use crate::catalog::{Absent, Named, SizedFile, folder_of};
use crate::{Catalog, Disk, FileIndex, FormatError, Source, Storage, TensorInfo};

const CONFIG: &str = "config.json";
const SINGLE_FILE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Largest JSON or template file that is read, in bytes. An index of the largest published models
/// has some 10 MB. `tokenizer.json` is not read here.
const TEXT_BYTES_MAX: u64 = 64 << 20;

/// Opens the model in a folder, or in the folder of the named file.
///
/// # Errors
/// Returns an error if the model cannot be opened, see [`Catalog::open`].
pub fn open(path: &Path) -> Result<Catalog, FormatError> {
    let root = if path.is_dir() { path } else { folder_of(path) };
    let metadata = read_metadata(&Folder::Disk(root))?;
    let mut absent = Vec::new();
    let read = &mut |file: &Path, index| {
        let (header, file_bytes) = parse_file(file, index)?;
        let empty = header.empty.into_iter().map(|tensor| Absent { tensor, shard: None });
        absent.extend(empty);
        Ok((header.tensors, file_bytes))
    };
    let (files, tensors) = if root.join(SINGLE_FILE).exists() {
        open_each(&Disk, &[root.join(SINGLE_FILE)], read)?
    } else if root.join(INDEX).exists() {
        let (files, tensors, missing) = open_shards(&Disk, root, read)?;
        // A tensor without elements is in its file.
        let is_known = |of: &Absent| absent.iter().any(|empty| empty.tensor == of.tensor);
        let missing: Vec<Absent> = missing.into_iter().filter(|of| !is_known(of)).collect();
        absent.extend(missing);
        (files, tensors)
    } else if is_safetensors(path) {
        // This is a single file with a name of its own.
        open_each(&Disk, &[path.to_owned()], read)?
    } else {
        let why = format!("the folder has neither {SINGLE_FILE} nor {INDEX}");
        return Err(FormatError::NoModel { path: root.to_owned(), why });
    };
    let source = Source::HuggingFace(Box::new(metadata));
    let mut catalog = Catalog::new(root.to_owned(), files, source, tensors)?;
    catalog.absent = absent;
    Ok(catalog)
}

/// Opens safetensors files that need not be a model: one file or those of a folder. A missing
/// `config.json` is not an error. A named file is opened alone. From a folder with neither an index
/// nor `model.safetensors`, all safetensors files are opened.
///
/// # Errors
/// Returns an error if the files cannot be opened, see [`Catalog::open_weights`].
pub fn open_weights(path: &Path) -> Result<Catalog, FormatError> {
    let root = if path.is_dir() { path } else { folder_of(path) };
    let (files, tensors) = weights_files(&Disk, path, path.is_dir(), &mut read_tensors)?;
    let config = Folder::Disk(root).json(CONFIG)?;
    let metadata = match config {
        Some(_) => read_metadata(&Folder::Disk(root))?,
        None => HfMetadata {
            config: Value::Object(serde_json::Map::new()),
            tokenizer_json: None,
            tiktoken: None,
            tokenizer_config: None,
            generation_config: None,
            chat_templates: ChatTemplates::default(),
        },
    };
    Catalog::new(root.to_owned(), files, Source::HuggingFace(Box::new(metadata)), tensors)
}

/// Returns the tensors of a safetensors file, and the file's size.
fn read_tensors(path: &Path, index: FileIndex) -> Result<(Vec<TensorInfo>, u64), FormatError> {
    let (header, file_bytes) = parse_file(path, index)?;
    Ok((header.tensors, file_bytes))
}

/// Reads the table of one safetensors file. Also returns the file's size.
pub(crate) type ReadFile<'a, T> =
    &'a mut dyn FnMut(&Path, FileIndex) -> Result<(Vec<T>, u64), FormatError>;

/// Returns the files that [`open_weights`] opens for `path`, and the entries that `read` finds in them.
pub(crate) fn weights_files<T: Named>(
    storage: &dyn Storage,
    path: &Path,
    is_folder: bool,
    read: ReadFile<'_, T>,
) -> Result<(Vec<SizedFile>, Vec<T>), FormatError> {
    if !is_folder {
        return open_each(storage, std::slice::from_ref(&path.to_owned()), read);
    }
    let (single, index) = (path.join(SINGLE_FILE), path.join(INDEX));
    if storage.exists(&single).map_err(FormatError::io(&single))? {
        return open_each(storage, &[single], read);
    }
    if storage.exists(&index).map_err(FormatError::io(&index))? {
        let (files, entries, missing) = open_shards(storage, path, read)?;
        return match missing.into_iter().next() {
            None => Ok((files, entries)),
            Some(Absent { tensor, shard }) => {
                let shard = shard.unwrap_or_default();
                Err(FormatError::MissingTensor { path: index, tensor, shard })
            }
        };
    }
    let mut found = storage.list(path).map_err(FormatError::io(path))?;
    found.retain(|path| is_safetensors(path));
    if found.is_empty() {
        let why = "the folder has no safetensors files".to_owned();
        return Err(FormatError::NoModel { path: path.to_owned(), why });
    }
    found.sort();
    open_each(storage, &found, read)
}

/// Returns the files with their sizes, and all of their entries.
pub(crate) fn open_each<T>(
    storage: &dyn Storage,
    paths: &[PathBuf],
    read: ReadFile<'_, T>,
) -> Result<(Vec<SizedFile>, Vec<T>), FormatError> {
    storage.expect(paths);
    let (mut files, mut tensors) = (Vec::new(), Vec::new());
    for (number, path) in paths.iter().enumerate() {
        let (entries, file_bytes) = read(path, FileIndex(number as u32))?;
        files.push((path.clone(), file_bytes));
        tensors.extend(entries);
    }
    Ok((files, tensors))
}

pub(crate) fn is_safetensors(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "safetensors")
}

/// Location of the files beside the weights.
pub enum Folder<'a> {
    Disk(&'a Path),
    /// Documents of the pack at this path.
    Pack(&'a Path, &'a [crate::pack::Embedded]),
}

impl Folder<'_> {
    /// Returns the path that errors show for a file.
    fn path(&self, name: &str) -> PathBuf {
        match self {
            Folder::Disk(root) => root.join(name),
            Folder::Pack(pack, _) => pack.join(name),
        }
    }

    /// Reads a whole file of bounded size. Returns `None` if there is no such file.
    fn read(&self, name: &str) -> Result<Option<Vec<u8>>, FormatError> {
        match self {
            Folder::Disk(root) => read_small(&Disk, &root.join(name)),
            Folder::Pack(_, documents) => {
                let found = documents.iter().find(|document| document.is_file(name));
                Ok(found.map(|document| document.content.to_vec()))
            }
        }
    }

    fn document(&self, name: &str) -> Option<Document> {
        match self {
            Folder::Disk(root) => {
                Some(root.join(name)).filter(|path| path.exists()).map(Document::on_disk)
            }
            Folder::Pack(_, documents) => {
                let found = documents.iter().find(|document| document.is_file(name))?;
                Some(Document::embedded(self.path(name), found.content.clone()))
            }
        }
    }

    /// Reads a JSON object from a file. Returns `None` if there is no such file.
    fn json(&self, name: &str) -> Result<Option<Value>, FormatError> {
        let Some(bytes) = self.read(name)? else { return Ok(None) };
        parse_object(&self.path(name), &bytes).map(Some)
    }
}

/// Reads the small files of a model.
pub fn read_metadata(folder: &Folder<'_>) -> Result<HfMetadata, FormatError> {
    let config = folder.json(CONFIG)?.ok_or_else(|| match folder {
        Folder::Disk(root) => no_config(root),
        Folder::Pack(path, _) => FormatError::NoModel {
            path: path.to_path_buf(),
            why: format!("the pack of a Hugging Face folder has no {CONFIG} inside"),
        },
    })?;
    let tokenizer_config = folder.json("tokenizer_config.json")?;
    let generation_config = folder.json("generation_config.json")?;
    let chat_templates = chat_templates(folder, tokenizer_config.as_ref())?;
    Ok(HfMetadata {
        config,
        tokenizer_json: folder.document("tokenizer.json"),
        tiktoken: ["tiktoken.model", "qwen.tiktoken"].iter().find_map(|name| folder.document(name)),
        tokenizer_config,
        generation_config,
        chat_templates,
    })
}

/// Returns the error for a folder without `config.json`, which names a GGUF file if the folder has
/// one.
fn no_config(root: &Path) -> FormatError {
    let names = std::fs::read_dir(root).into_iter().flatten().flatten();
    let gguf = names.map(|entry| entry.path()).find(|path| {
        path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
    });
    let why = match gguf {
        Some(file) => format!(
            "the folder has no {CONFIG}, but GGUF files; name one of them, such as {}",
            file.display()
        ),
        None => format!("the folder has no {CONFIG}"),
    };
    FormatError::NoModel { path: root.to_owned(), why }
}

/// Finds the chat templates, see [`ChatTemplates`].
fn chat_templates(
    folder: &Folder<'_>,
    tokenizer_config: Option<&Value>,
) -> Result<ChatTemplates, FormatError> {
    let tool_use = template_file(folder, "additional_chat_templates/tool_use.jinja")?;
    let default = template_file(folder, "chat_template.jinja")?;
    if default.is_some() {
        return Ok(ChatTemplates { default, tool_use });
    }
    let beside = folder.json("chat_template.json")?;
    let files =
        [("chat_template.json", beside.as_ref()), ("tokenizer_config.json", tokenizer_config)];
    let named = |name: &str| {
        files.iter().find_map(|(file, json)| {
            let text = named_template(json.as_ref()?.get("chat_template")?, name)?;
            let entry = if name == "default" { String::new() } else { format!(" ({name})") };
            Some(TemplateSource { text: text.to_owned(), origin: format!("{file}{entry}") })
        })
    };
    Ok(ChatTemplates {
        default: named("default"),
        tool_use: tool_use.or_else(|| named("tool_use")),
    })
}

/// Reads a file with a chat template.
fn template_file(folder: &Folder<'_>, name: &str) -> Result<Option<TemplateSource>, FormatError> {
    let Some(bytes) = folder.read(name)? else { return Ok(None) };
    let text = String::from_utf8(bytes).map_err(|error| FormatError::NotUtf8 {
        path: folder.path(name),
        what: "the chat template",
        offset: error.utf8_error().valid_up_to() as u64,
    })?;
    Ok(Some(TemplateSource { text, origin: name.to_owned() }))
}

/// Returns the template of this name among one template, a list of objects with `name` and `template`, or an object of
/// templates by name.
fn named_template<'a>(templates: &'a Value, name: &str) -> Option<&'a str> {
    match templates {
        Value::String(text) => Some(text.as_str()).filter(|_| name == "default"),
        Value::Array(all) => {
            let found = all.iter().find(|template| template["name"] == name);
            // If no template is the default one, the first one is.
            let found = found.or_else(|| all.first().filter(|_| name == "default"));
            found?.get("template")?.as_str()
        }
        other => other.get(name)?.as_str(),
    }
}

/// Files of a folder, their tensors, and the tensors that its index names although their files lack them.
type Shards<T> = (Vec<SizedFile>, Vec<T>, Vec<Absent>);

/// Returns all shards that the index names, in the order of their names.
fn open_shards<T: Named>(
    storage: &dyn Storage,
    root: &Path,
    read: ReadFile<'_, T>,
) -> Result<Shards<T>, FormatError> {
    let index = root.join(INDEX);
    let json = read_json(storage, &index)?.unwrap_or_default();
    let invalid = |what: &str| FormatError::InvalidJson { path: index.clone(), what: what.into() };
    let map = json
        .get("weight_map")
        .and_then(Value::as_object)
        .ok_or_else(|| invalid("\"weight_map\" is not an object of tensor names"))?;
    let mut shards: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for (tensor, shard) in map {
        let shard =
            shard.as_str().ok_or_else(|| invalid("a file in \"weight_map\" is no string"))?;
        let name = inside(shard).ok_or_else(|| FormatError::InvalidShardName {
            path: index.clone(),
            shard: shard.to_owned(),
        })?;
        shards.entry(name).or_default().push(tensor);
    }

    let paths: Vec<PathBuf> = shards.keys().map(|shard| root.join(shard)).collect();
    storage.expect(&paths);
    let (mut files, mut tensors, mut missing) = (Vec::new(), Vec::new(), Vec::new());
    for (number, ((shard, mut wanted), path)) in shards.into_iter().zip(paths).enumerate() {
        if !storage.exists(&path).map_err(FormatError::io(&path))? {
            return Err(FormatError::MissingShard { path: index, shard });
        }
        let (entries, file_bytes) = read(&path, FileIndex(number as u32))?;
        wanted.sort_unstable();
        let wants = |name: &str| wanted.binary_search(&name).is_ok();
        // The index decides. Tensors that it does not assign to this file are left out.
        let kept: Vec<T> = entries.into_iter().filter(|tensor| wants(tensor.name())).collect();
        let found: HashSet<&str> = kept.iter().map(Named::name).collect();
        let lacking = wanted.into_iter().filter(|name| !found.contains(name));
        missing.extend(
            lacking.map(|tensor| Absent { tensor: tensor.into(), shard: Some(shard.clone()) }),
        );
        tensors.extend(kept);
        files.push((path, file_bytes));
    }
    Ok((files, tensors, missing))
}

/// Returns the files that a folder's index names inside the folder. Returns none if there is no
/// readable index.
pub(crate) fn shard_names(root: &Path) -> Vec<String> {
    let json = read_json(&Disk, &root.join(INDEX)).ok().flatten().unwrap_or_default();
    let map = json.get("weight_map").and_then(Value::as_object);
    let files = map.into_iter().flat_map(|map| map.values()).filter_map(Value::as_str);
    let mut names: Vec<String> = files.filter_map(inside).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// Returns the shortest form of a file's name that leads into a folder or one below it, such as `a/b` for `./a/b`. Returns `None` for
/// names that may lead out of the folder.
fn inside(name: &str) -> Option<String> {
    let mut parts = Vec::new();
    for part in Path::new(name).components() {
        match part {
            Component::CurDir => {}
            Component::Normal(part) => parts.push(part.to_str()?),
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    (!parts.is_empty()).then(|| parts.join("/"))
}

/// Reads a JSON object from a file. Returns `None` if there is no such file.
fn read_json(storage: &dyn Storage, path: &Path) -> Result<Option<Value>, FormatError> {
    let Some(bytes) = read_small(storage, path)? else {
        return Ok(None);
    };
    parse_object(path, &bytes).map(Some)
}

/// Reads a whole file of bounded size. Returns `None` if there is no such file.
fn read_small(storage: &dyn Storage, path: &Path) -> Result<Option<Vec<u8>>, FormatError> {
    let file = match storage.open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(FormatError::io(path))?.0,
    };
    let mut bytes = Vec::new();
    file.take(TEXT_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(FormatError::io(path))?;
    if bytes.len() as u64 > TEXT_BYTES_MAX {
        return Err(FormatError::LimitExceeded {
            path: path.to_owned(),
            what: "the size of the file",
            offset: 0,
            found: bytes.len() as u64,
            limit: TEXT_BYTES_MAX,
        });
    }
    Ok(Some(bytes))
}
