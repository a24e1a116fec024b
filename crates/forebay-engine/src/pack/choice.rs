//! Chooses how the tensors of a pack are stored: compact BF16, and codecs of chunks.

use std::collections::{BTreeMap, BTreeSet};

use forebay_codec::{Codec as ChunkCodec, Compact, Encoding};
use forebay_format::pack::{CODED_CHUNK_BYTES_MAX, Conversion, TensorStorage};
use forebay_format::{Block, Catalog, Extent, TensorInfo, TensorType};
use forebay_model::Weights;
use forebay_model::weights::{FeedForwardWeights, PartMatrix};
use forebay_store::FileSet;

use super::PackError;
use super::blocks::tensor_at;
use super::writer::encode;

/// Smallest part of its bytes that a codec must save. Decoding less does not pay.
const SAVED_MIN: f64 = 0.03;
/// Smallest part that `auto` asks of Zstandard. A core decodes 1 to 2 GB/s of it, about a fifth of `exponents`.
const SAVED_BY_ZSTD_MIN: f64 = 0.10;
/// `auto` takes Zstandard where it needs at most this part of the bytes that `exponents` needs.
const ZSTD_INSTEAD: f64 = 0.85;
/// Level of Zstandard: its default, which encodes at about the speed of a disk with some cores.
const ZSTD_LEVEL: i32 = 3;
/// Number of parts of a group of tensors that are encoded to choose its codec.
const SAMPLES: usize = 4;
/// Smaller tensors are stored as they are.
const TENSOR_BYTES_MIN: u64 = 16 << 10;

/// What a pack does to weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Codec {
    /// Every BF16 matrix that products read as it is becomes compact, unless its exponents lie too far apart. Chunks are coded where this
    /// saves enough: with `exponents`, else with `zstd`.
    #[default]
    Auto,
    /// All tensors are stored as they are.
    None,
    /// BF16 becomes compact, and nothing is coded.
    Compact,
    /// BF16 becomes compact, and this codec is used wherever it saves at least 3 %. So are the others below.
    Exponents,
    Zstd,
    Gdeflate,
}

impl Codec {
    /// Returns the only codec of chunks that may be used, if the choice is made.
    fn only(self) -> Option<ChunkCodec> {
        match self {
            Codec::Auto => None,
            Codec::None | Codec::Compact => Some(ChunkCodec::Raw),
            Codec::Exponents => Some(ChunkCodec::Exponents),
            Codec::Zstd => Some(ChunkCodec::Zstd),
            Codec::Gdeflate => Some(ChunkCodec::Gdeflate),
        }
    }
}

/// How each tensor is stored.
#[derive(Debug)]
pub struct Choice {
    compact: Vec<Option<Compact>>,
    /// Codec of each tensor's chunks.
    codecs: Vec<ChunkCodec>,
    /// Number of each tensor's group. Products take the tensors of a group together, so they must have one type.
    groups: Vec<usize>,
    /// Codec of tensors that stay BF16 because a tensor of their group cannot become compact, and the number of these tensors.
    of_bf16: ChunkCodec,
    left_out: usize,
}

impl Choice {
    /// Chooses how the tensors of a model are stored. Parts of the tensors are read to measure codecs.
    ///
    /// # Errors
    /// Returns an error if a read fails.
    pub fn new(
        catalog: &Catalog,
        weights: &Weights,
        codec: Codec,
        files: &FileSet,
    ) -> Result<Choice, PackError> {
        let count = catalog.tensors().len();
        let mut choice = Choice {
            compact: vec![None; count],
            codecs: vec![ChunkCodec::Raw; count],
            groups: (0..count).collect(),
            of_bf16: codec.only().unwrap_or(ChunkCodec::Exponents),
            left_out: 0,
        };
        if codec != Codec::None {
            choice.find(catalog, weights);
        }
        if codec.only() != Some(ChunkCodec::Raw) {
            choice.measure(catalog, weights, codec, files)?;
        }
        Ok(choice)
    }

    /// Finds groups, and every BF16 matrix that products or the embedding read as the file has it. Left out are routers, the matrices of single
    /// heads, and what is converted when it is read.
    fn find(&mut self, catalog: &Catalog, weights: &Weights) {
        let choice = self;
        choice.add(catalog, [weights.embedding.extent]);
        choice.add(catalog, weights.layer_embeddings.map(|table| table.extent));
        let layers = weights.layers.len();
        for (layer, block) in weights.layers.iter().zip(&weights.blocks.dense) {
            let mut plain = Vec::new();
            let mut together = Vec::new();
            plain.extend(layer.attention.head_matrices().iter().map(|of| of.matrix));
            match &layer.feed_forward {
                FeedForwardWeights::None => {}
                FeedForwardWeights::Dense { gate, up, .. } => together.extend(pair(gate, up)),
                FeedForwardWeights::Experts { router, shared, .. } => {
                    plain.push(*router);
                    together.extend(shared.iter().flat_map(|[gate, up, _]| pair(gate, up)));
                }
            }
            let plain: Vec<Extent> =
                plain.iter().filter_map(|matrix| extent_of(block, matrix)).collect();
            choice.add(catalog, as_they_are(block).filter(|of| !plain.contains(of)));
            choice.join(catalog, together.iter().filter_map(|matrix| extent_of(block, matrix)));
        }
        for experts in &weights.blocks.experts {
            if experts.iter().any(|block| block.relayout.is_some()) {
                continue;
            }
            // Gate and up, then down. Experts without a gate have two parts.
            let parts = experts.first().map_or(3, |block| block.extents.len());
            let down = parts.saturating_sub(1);
            for parts in [0..down, down..parts] {
                let of_expert = |block: &Block| block.extents[parts.clone()].to_vec();
                let extents = || experts.iter().flat_map(of_expert);
                choice.add(catalog, extents());
                choice.join(catalog, extents());
            }
        }
        for block in weights.blocks.dense.iter().skip(layers) {
            choice.add(catalog, as_they_are(block));
        }
    }

    /// Adds the tensors that contain these extents, if they can become compact.
    fn add(&mut self, catalog: &Catalog, extents: impl IntoIterator<Item = Extent>) {
        for tensor in extents.into_iter().filter_map(|extent| tensor_at(catalog, &extent)) {
            let of = &catalog.tensors()[tensor];
            let is_matrix = of.ty == TensorType::BF16 && of.shape.len() > 1;
            let columns = of.shape.last().copied().unwrap_or(0);
            self.compact[tensor] = Compact::of_row(columns).filter(|_| is_matrix);
        }
    }

    /// Makes one group of the tensors that contain these extents.
    fn join(&mut self, catalog: &Catalog, extents: impl Iterator<Item = Extent>) {
        let mut first = None;
        for tensor in extents.filter_map(|extent| tensor_at(catalog, &extent)) {
            self.groups[tensor] = *first.get_or_insert(tensor);
        }
    }

    /// Leaves out the tensors that cannot become compact, and their groups.
    pub fn leave_out(&mut self, tensors: &BTreeSet<usize>) {
        let groups: BTreeSet<usize> = tensors.iter().map(|&tensor| self.groups[tensor]).collect();
        let tensors = self.compact.iter_mut().zip(&mut self.codecs).zip(&self.groups);
        for ((compact, codec), group) in tensors {
            if groups.contains(group) && compact.take().is_some() {
                self.left_out += 1;
                *codec = self.of_bf16;
            }
        }
    }

    /// Encodes a few parts of each group, and chooses its codec.
    fn measure(
        &mut self,
        catalog: &Catalog,
        weights: &Weights,
        codec: Codec,
        files: &FileSet,
    ) -> Result<(), PackError> {
        // A row of a few hundred bytes would need its whole chunk.
        let tables: Vec<Extent> = weights.ngram_tables().collect();
        let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (tensor, group) in self.groups.iter().enumerate() {
            let own = &catalog.tensors()[tensor];
            if own.bytes() >= TENSOR_BYTES_MIN && !tables.contains(&own.extent) {
                groups.entry(*group).or_default().push(tensor);
            }
        }
        for tensors in groups.values() {
            let mut samples = Samples::new();
            for sample in 0..SAMPLES {
                let tensor = tensors[sample * tensors.len() / SAMPLES];
                let (of, compact) = (&catalog.tensors()[tensor], self.compact[tensor]);
                samples.take(of, compact, sample, codec, files)?;
            }
            let chosen = samples.choose(codec);
            tensors.iter().for_each(|&tensor| self.codecs[tensor] = chosen);
        }
        Ok(())
    }

    /// Returns how each tensor is stored.
    pub fn storage(&self, catalog: &Catalog) -> Vec<TensorStorage> {
        let all = catalog.tensors().iter().zip(&self.compact).zip(&self.codecs);
        let storage = |((tensor, &compact), &codec): ((&TensorInfo, &Option<Compact>), _)| {
            let encoding = encoding(codec, tensor.ty, compact).unwrap_or(Encoding::Raw);
            TensorStorage { compact, encoding }
        };
        all.map(storage).collect()
    }

    /// Returns the number of tensors that stay BF16 because their exponents lie too far apart, or those of tensors beside them.
    pub fn left_out(&self) -> usize {
        self.left_out
    }
}

/// Returns the encoding of a tensor of type `ty` that becomes `compact`, or `None` if the codec is not for it.
fn encoding(codec: ChunkCodec, ty: TensorType, compact: Option<Compact>) -> Option<Encoding> {
    Some(match codec {
        ChunkCodec::Raw => Encoding::Raw,
        ChunkCodec::Exponents => {
            Encoding::Exponents(compact.map_or(ty, TensorType::from_compact).weights()?)
        }
        ChunkCodec::Zstd => Encoding::Zstd { level: ZSTD_LEVEL },
        ChunkCodec::Gdeflate => Encoding::Gdeflate,
    })
}

/// Bytes of parts of tensors, as they are and encoded.
#[derive(Debug)]
struct Samples {
    bytes: usize,
    /// Bytes with each codec.
    encoded: [(ChunkCodec, usize); 3],
}

impl Samples {
    fn new() -> Samples {
        let codecs = [ChunkCodec::Exponents, ChunkCodec::Zstd, ChunkCodec::Gdeflate];
        Samples { bytes: 0, encoded: codecs.map(|codec| (codec, 0)) }
    }

    /// Encodes a part of a tensor. Parts whose weights cannot become compact are left out.
    fn take(
        &mut self,
        tensor: &TensorInfo,
        compact: Option<Compact>,
        number: usize,
        codec: Codec,
        files: &FileSet,
    ) -> Result<(), PackError> {
        let extents: Vec<Extent> = tensor.extents().collect();
        let extent = extents[number * extents.len() / SAMPLES];
        let unit = compact.map_or(tensor.ty.block_bytes(), Compact::plain_bytes) as u64;
        let most = CODED_CHUNK_BYTES_MAX / unit * unit;
        let length = (extent.length / unit * unit).min(most);
        let at = (extent.length - length) * number as u64 / SAMPLES as u64 / unit * unit;
        let Some(part) = extent.slice(at, length).filter(|part| part.length > 0) else {
            return Ok(());
        };
        let mut bytes = vec![0; part.length as usize];
        files.read_exact(part, &mut bytes)?;
        if let Some(of) = compact {
            let mut blocks = vec![0; bytes.len() / of.plain_bytes() * of.bytes()];
            if !Conversion::Compact(of).convert(&bytes, &mut blocks) {
                return Ok(());
            }
            bytes = blocks;
        }
        self.bytes += bytes.len();
        for (of, sum) in &mut self.encoded {
            let wanted = codec.only().map_or(*of != ChunkCodec::Gdeflate, |only| only == *of);
            let mut encoded = Vec::new();
            if let Some(encoding) = encoding(*of, tensor.ty, compact).filter(|_| wanted) {
                encode(encoding, &bytes, &mut encoded)?;
            }
            *sum += if encoded.is_empty() { bytes.len() } else { encoded.len() };
        }
        Ok(())
    }

    fn choose(&self, codec: Codec) -> ChunkCodec {
        let saves = |bytes: usize, least: f64| bytes as f64 <= (1.0 - least) * self.bytes as f64;
        let of =
            |codec| self.encoded.iter().find(|(of, _)| *of == codec).map_or(self.bytes, |of| of.1);
        if let Some(only) = codec.only() {
            return if saves(of(only), SAVED_MIN) { only } else { ChunkCodec::Raw };
        }
        let (exponents, zstd) = (of(ChunkCodec::Exponents), of(ChunkCodec::Zstd));
        let zstd_instead = zstd as f64 <= ZSTD_INSTEAD * exponents as f64;
        if saves(exponents, SAVED_MIN) && !zstd_instead {
            ChunkCodec::Exponents
        } else if saves(zstd, SAVED_BY_ZSTD_MIN) {
            ChunkCodec::Zstd
        } else {
            ChunkCodec::Raw
        }
    }
}

/// Returns the extents of a block that are its parts without a conversion.
fn as_they_are(block: &Block) -> impl Iterator<Item = Extent> + '_ {
    let converted = block.relayout.as_ref().map_or(0..0, |relayout| relayout.extents.clone());
    let extents = block.extents.iter().enumerate();
    extents.filter(move |(index, _)| !converted.contains(index)).map(|(_, extent)| *extent)
}

/// Returns the extent of a matrix of a block, if the matrix is not made of others when it is read.
fn extent_of(block: &Block, matrix: &PartMatrix) -> Option<Extent> {
    let Some(relayout) = &block.relayout else { return block.extents.get(matrix.part).copied() };
    let (first, made) = (relayout.extents.start, relayout.parts());
    let index = match matrix.part {
        part if part < first => part,
        part if part < first + made => return None,
        part => part - made + relayout.extents.len(),
    };
    block.extents.get(index).copied()
}

/// Returns gate and up of a feed-forward, or the one that stands for both.
fn pair(gate: &PartMatrix, up: &PartMatrix) -> impl Iterator<Item = PartMatrix> {
    let up = (up.part != gate.part).then_some(*up);
    [Some(*gate), up].into_iter().flatten()
}
