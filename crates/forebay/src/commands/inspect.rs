//! `forebay inspect` describes the contents of a model file from its headers alone.

use forebay_engine::{BlockKindBytes, Feature, Inspection, ModelInfo};
use forebay_format::{Catalog, Extent, TensorInfo};
use serde::Serialize;

use crate::args::InspectArgs;
use crate::failure::Outcome;
use crate::open;
use crate::output::{self, Align, grouped};
use crate::size;

#[derive(Serialize)]
struct Document<'a> {
    #[serde(flatten)]
    inspection: &'a Inspection,
    files: Vec<File<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tensors: Option<Vec<Tensor<'a>>>,
}

#[derive(Serialize)]
struct File<'a> {
    path: &'a std::path::Path,
    bytes: u64,
}

#[derive(Serialize)]
struct Tensor<'a> {
    name: &'a str,
    #[serde(rename = "type")]
    ty: &'static str,
    shape: &'a [u64],
    file: u32,
    offset_bytes: u64,
    bytes: u64,
}

pub fn run(args: InspectArgs) -> Outcome {
    let inspection = match open::inspect(&args.model) {
        Ok(inspection) => inspection,
        // The names of tensors are what work on a new family begins with.
        Err(unknown) if args.tensors && !args.json => {
            if let Ok(catalog) = open::catalog(&args.model) {
                output::print(&tensors(&catalog))?;
            }
            return Err(unknown);
        }
        Err(error) => return Err(error),
    };
    if args.json {
        let catalog = &inspection.catalog;
        let files = catalog.files.iter().zip(&catalog.file_bytes);
        let files = files.map(|(path, &bytes)| File { path, bytes }).collect();
        let tensors = args.tensors.then(|| tensors_of(catalog));
        return output::json(&Document { inspection: &inspection, files, tensors });
    }
    let mut text = summary(&inspection);
    text.push('\n');
    if !inspection.features.is_empty() {
        text.push_str(&features(&inspection.features));
        text.push('\n');
    }
    text.push_str(&kinds(&inspection.model));
    text.push('\n');
    text.push_str(&types(&inspection.model));
    if args.tensors {
        text.push('\n');
        text.push_str(&tensors(&inspection.catalog));
    }
    output::print(&text)
}

fn tensors_of(catalog: &Catalog) -> Vec<Tensor<'_>> {
    let tensor = |info| tensor(info, catalog.stored(info.extent));
    catalog.tensors().iter().map(tensor).collect()
}

fn tensor(info: &TensorInfo, stored: Extent) -> Tensor<'_> {
    Tensor {
        name: &info.name,
        ty: info.ty.name(),
        shape: &info.shape,
        file: info.extent.file.0,
        offset_bytes: stored.offset,
        bytes: info.bytes(),
    }
}

fn summary(inspection: &Inspection) -> String {
    let model = &inspection.model;
    let files = inspection.catalog.files.len();
    let mut lines: Vec<(&str, String)> = Vec::new();
    if let Some(name) = &model.name {
        lines.push(("name", name.clone()));
    }
    lines.push(("architecture", model.architecture.into()));
    let plural = if files == 1 { "" } else { "s" };
    lines.push((
        "files",
        format!("{} in {files} file{plural}, {}", size::format(model.file_bytes), model.format),
    ));
    lines.push(("parameters", grouped(model.parameters)));
    lines.push((
        "shape",
        format!(
            "{} layers, hidden {}, {} heads ({} key/value) of {}, vocabulary {}",
            model.layers,
            model.hidden,
            model.heads,
            model.kv_heads,
            model.head_dim,
            grouped(model.vocabulary as u64)
        ),
    ));
    if model.experts > 0 {
        lines.push((
            "experts",
            format!(
                "{} per layer, {} per token, {} each",
                model.experts,
                model.experts_per_token,
                size::format(model.bytes_per_expert)
            ),
        ));
    }
    let (all, kept) = (inspection.kv_bytes_per_position, inspection.kv_bytes_per_position_kept);
    let mut cache = format!("{} for a position in f16", size::format(all));
    if kept < all {
        cache += &format!(", {} beyond the windows", size::format(kept));
    }
    lines.push(("cache", cache));
    let states = inspection.state_bytes_per_sequence;
    if states > 0 {
        lines.push(("states", format!("{} for a sequence of any length", size::format(states))));
    }
    lines.push(("context", format!("{} positions trained", grouped(model.context_trained as u64))));
    lines.push(("tokenizer", inspection.tokenizer.clone()));
    let template = inspection.chat_template.as_deref();
    lines.push(("chat template", template.unwrap_or("none (forebay run --raw)").into()));
    if let Some(template) = &inspection.tools_template {
        lines.push(("for tools", template.clone()));
    }
    let rows: Vec<Vec<String>> =
        lines.into_iter().map(|(key, value)| vec![key.to_string(), value]).collect();
    output::table(&[Align::Left, Align::Left], &rows)
}

/// Formats the features that distinguish the model from a plain decoder.
fn features(features: &[Feature]) -> String {
    let row = |feature: &Feature| vec![feature.name.to_owned(), feature.detail.clone()];
    let rows: Vec<Vec<String>> = features.iter().map(row).collect();
    output::table(&[Align::Left, Align::Left], &rows)
}

fn kinds(model: &ModelInfo) -> String {
    let rows = model.kinds.iter().map(|kind| (kind.kind, kind.tensors, kind.bytes));
    let mut text = shares("blocks", model.weights_bytes, rows);
    let smaller = |kind: &&BlockKindBytes| kind.plain_bytes > kind.bytes.min(kind.stored_bytes);
    let ratio = |name: &str, plain_bytes: u64, bytes: u64, stored_bytes: u64| {
        let of = |bytes: u64| format!("{:.2}", plain_bytes as f64 / bytes.max(1) as f64);
        vec![name.to_owned(), of(bytes), of(stored_bytes)]
    };
    let mut rows: Vec<Vec<String>> = model
        .kinds
        .iter()
        .filter(smaller)
        .map(|kind| ratio(kind.kind, kind.plain_bytes, kind.bytes, kind.stored_bytes))
        .collect();
    if !rows.is_empty() {
        let sum = |of: &dyn Fn(&BlockKindBytes) -> u64| model.kinds.iter().map(of).sum();
        let (plain_bytes, stored_bytes) = (sum(&|it| it.plain_bytes), sum(&|it| it.stored_bytes));
        rows.push(ratio("all", plain_bytes, model.weights_bytes, stored_bytes));
        rows.insert(0, vec!["compressed".into(), "in memory".into(), "in the file".into()]);
        text.push('\n');
        text.push_str(&output::table(&[Align::Left, Align::Right, Align::Right], &rows));
    }
    text
}

fn types(model: &ModelInfo) -> String {
    let rows = model.types.iter().map(|ty| (ty.name, ty.tensors, ty.bytes));
    shares("weights in", model.weights_bytes, rows)
}

/// Formats a table of parts with their share of the whole.
fn shares<'a>(
    head: &str,
    total_bytes: u64,
    parts: impl Iterator<Item = (&'a str, usize, u64)>,
) -> String {
    let mut rows = vec![vec![head.to_string(), "tensors".into(), "size".into(), "share".into()]];
    for (name, tensors, bytes) in parts {
        let share = 100.0 * bytes as f64 / total_bytes.max(1) as f64;
        rows.push(vec![
            name.into(),
            tensors.to_string(),
            size::format(bytes),
            format!("{share:.1} %"),
        ]);
    }
    rows.push(vec!["all".into(), String::new(), size::format(total_bytes), String::new()]);
    output::table(&[Align::Left, Align::Right, Align::Right, Align::Right], &rows)
}

fn tensors(catalog: &Catalog) -> String {
    let head = ["tensor", "type", "shape", "size", "file", "offset"];
    let mut rows = vec![head.map(String::from).to_vec()];
    for info in catalog.tensors() {
        let shape: Vec<String> = info.shape.iter().map(u64::to_string).collect();
        rows.push(vec![
            info.name.clone(),
            info.ty.name().into(),
            shape.join(" x "),
            size::format(info.bytes()),
            info.extent.file.0.to_string(),
            catalog.stored(info.extent).offset.to_string(),
        ]);
    }
    let columns =
        [Align::Left, Align::Left, Align::Right, Align::Right, Align::Right, Align::Right];
    output::table(&columns, &rows)
}
