//! Writes models with the exact shape of a real architecture and random weights, for benchmarks and tests.
//!
//! They load wherever the real models do, and have the same size and speed. Their output is nonsense.

mod error;
mod known;
mod plan;
mod recipe;
mod shapes;
mod vocabulary;
mod write;

use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use forebay_format::gguf::writer::GgufWriter;
use forebay_format::random_weights::tensor_seed;
use forebay_format::{FormatError, TensorType};
use forebay_store::OutputFile;
use serde::Serialize;

pub use error::{Progress, SynthError};
use known::SHAPES;
use recipe::Recipe;
use shapes::Shape;

/// Options of [`synthesize`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SynthOptions {
    /// A mix such as `Q4_K_M`, or one type for all matrices such as `Q8_0`; case does not matter. `None` means the
    /// quantisation of the published files.
    pub quantisation: Option<String>,
    /// Number of layers to write, from the first; `None` means all layers of the architecture.
    pub layers: Option<u32>,
    /// Number of experts that a token uses; `None` means as many as in the architecture.
    pub experts_used: Option<u32>,
    /// Number of tokens in the vocabulary; `None` means as many as in the architecture.
    pub vocabulary: Option<u32>,
    /// Number of positions that the model says it was trained for; `None` means as many as the architecture.
    pub context: Option<u32>,
    /// True to write DeepSeek's key and value matrices of all heads as one tensor, as converters did until 2025.
    pub heads_in_one_tensor: bool,
    /// True to write the layer for multi-token prediction that the published model has.
    pub mtp: bool,
    /// Random seed. The same seed gives the same file, byte for byte.
    pub seed: u64,
    /// Number of threads that make weights. The file does not depend on it.
    pub threads: usize,
}

impl Default for SynthOptions {
    fn default() -> Self {
        Self {
            quantisation: None,
            layers: None,
            experts_used: None,
            vocabulary: None,
            context: None,
            heads_in_one_tensor: false,
            mtp: false,
            seed: 0,
            threads: 2,
        }
    }
}

/// Description of a written model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SynthReport {
    pub path: PathBuf,
    /// Requested name, such as `qwen3moe-30b`.
    pub shape: String,
    /// `general.architecture` of the file.
    pub architecture: String,
    pub quantisation: String,
    pub layers: u32,
    pub tensors: usize,
    pub parameters: u64,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// Time from the start until the file was durable.
    pub seconds: f64,
    pub bytes_per_second: f64,
}

/// Returns the names that [`synthesize`] knows.
pub fn architectures() -> impl ExactSizeIterator<Item = &'static str> {
    SHAPES.iter().map(|shape| shape.name)
}

/// Writes a GGUF file with the shape of `arch` to `out`. The file appears under its name only when it is complete and
/// durable.
///
/// # Errors
/// Returns an error if a name is unknown, the architecture does not have that many layers or experts, the output cannot
/// be written, or `progress` returns false. No file is left behind, even when the disk is full.
pub fn synthesize(
    arch: &str,
    out: OutputFile,
    options: &SynthOptions,
    progress: &mut Progress<'_>,
) -> Result<SynthReport, SynthError> {
    let started = Instant::now();
    let (shape, recipe, layers) = choice(arch, options)?;
    let tensors = plan::tensors(&shape, &recipe, layers)?;
    let path = out.path().to_path_buf();
    let writer = writer(&path, &shape, &recipe, layers, &tensors)?;
    let (_, placed) = writer.clone().into_header()?;
    let bytes = placed.iter().map(|tensor| tensor.extent.offset + tensor.extent.length).max();
    out.reserve(bytes.unwrap_or_default())?;
    let mut data = writer.start(out.into_stream())?;
    write::write_all(&tensors, &mut data, options.seed, options.threads, progress)?;
    data.finish()?.commit()?;

    let bytes = bytes.unwrap_or_default();
    let seconds = started.elapsed().as_secs_f64();
    Ok(SynthReport {
        path,
        shape: shape.name.to_owned(),
        architecture: shape.architecture.to_owned(),
        quantisation: recipe.name.to_owned(),
        layers,
        tensors: tensors.len(),
        parameters: tensors.iter().map(|tensor| tensor.shape.iter().product::<u64>()).sum(),
        bytes,
        seconds,
        bytes_per_second: bytes as f64 / seconds,
    })
}

/// Returns the shape with `asked` experts per token.
fn with_experts_used(mut shape: Shape, asked: Option<u32>) -> Result<Shape, SynthError> {
    let Some(asked) = asked else { return Ok(shape) };
    let name = shape.name;
    let refused =
        |experts: u32| SynthError::ExpertsUsed { shape: name, experts, used: asked, most: experts };
    match &mut shape.feed_forward {
        shapes::FeedForward::Experts(experts) if (1..=experts.experts).contains(&asked) => {
            experts.used = asked;
            Ok(shape)
        }
        shapes::FeedForward::Experts(experts) => Err(refused(experts.experts)),
        shapes::FeedForward::Dense { .. } => Err(SynthError::NoExperts { shape: name }),
    }
}

/// Writes the file that [`synthesize`] would write, but with a hole instead of its weights. This suits everything that
/// reads no weights, such as plans. The hole takes no disk space and reads as zeros. Tables of experts by token are written.
///
/// # Errors
/// Returns the errors of [`synthesize`], except those of `progress`.
pub fn hollow(arch: &str, out: &Path, options: &SynthOptions) -> Result<(), SynthError> {
    let (shape, recipe, layers) = choice(arch, options)?;
    let tensors = plan::tensors(&shape, &recipe, layers)?;
    let (header, placed) = writer(out, &shape, &recipe, layers, &tensors)?.into_header()?;
    let bytes = placed.iter().map(|tensor| tensor.extent.offset + tensor.extent.length).max();
    let written = std::fs::write(out, header).and_then(|()| {
        let mut file = std::fs::File::options().write(true).open(out)?;
        file.set_len(bytes.unwrap_or_default())?;
        let tables = tensors.iter().zip(&placed).filter(|(tensor, _)| tensor.ty == TensorType::I32);
        for (tensor, placed) in tables {
            let mut table = vec![0; placed.extent.length as usize];
            tensor.content.fill(tensor_seed(options.seed, &tensor.name), 0, &mut table);
            file.seek(SeekFrom::Start(placed.extent.offset))?;
            file.write_all(&table)?;
        }
        Ok(())
    });
    written.map_err(|source| FormatError::Io { path: out.to_owned(), source }.into())
}

fn choice(arch: &str, options: &SynthOptions) -> Result<(Shape, Recipe, u32), SynthError> {
    let shape = known::find(arch).ok_or_else(|| SynthError::UnknownArchitecture {
        name: arch.to_owned(),
        known: architectures().collect(),
    })?;
    let name = options.quantisation.as_deref().unwrap_or(shape.quantisation);
    let recipe = Recipe::find(name).ok_or_else(|| SynthError::unknown_quantisation(name))?;
    let mut shape = with_experts_used(*shape, options.experts_used)?;
    shape.context = options.context.unwrap_or(shape.context);
    shape.vocabulary = options.vocabulary.unwrap_or(shape.vocabulary);
    if options.mtp && !shape.has_mtp {
        return Err(SynthError::NoMtp { shape: shape.name });
    }
    shape.writes_mtp = options.mtp;
    if let Some(latent) = &mut shape.latent_attention {
        latent.one_tensor = options.heads_in_one_tensor;
    }
    let layers = layers_of(&shape, options.layers)?;
    Ok((shape, recipe, layers))
}

/// Returns a writer for everything but the data.
fn writer(
    out: &Path,
    shape: &Shape,
    recipe: &Recipe,
    layers: u32,
    tensors: &[plan::PlannedTensor],
) -> Result<GgufWriter, SynthError> {
    let mut writer = GgufWriter::new(out);
    plan::describe(shape, recipe, layers, &mut writer)?;
    vocabulary::describe(shape, &mut writer)?;
    for tensor in tensors {
        writer.add_tensor(&tensor.name, tensor.ty, &tensor.shape)?;
    }
    Ok(writer)
}

fn layers_of(shape: &Shape, asked: Option<u32>) -> Result<u32, SynthError> {
    let layers = asked.unwrap_or(shape.layers);
    let layers_min = shape.layers_min();
    if (layers_min..=shape.layers).contains(&layers) {
        Ok(layers)
    } else {
        Err(SynthError::Layers { shape: shape.name, layers, layers_min, layers_max: shape.layers })
    }
}
