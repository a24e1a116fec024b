//! Weights of the predicting layer beside those that every layer has.

use forebay_format::Block;
use forebay_stream::ModelBlocks;

use super::ends::{Embedding, embedding, head};
use super::parts::{HeadChunk, PartMatrix};
use super::tensors::Tensors;
use crate::ModelError;
use crate::arch::{Architecture, Names};

/// What the predicting layer has beside the weights of a layer.
#[derive(Debug)]
pub struct MtpWeights {
    /// Projection `[hidden, 2 * hidden]` of the normed embedding followed by the normed state. It is the last part of the layer's
    /// dense block.
    pub join: PartMatrix,
    pub embedding_norm: Vec<f32>,
    pub hidden_norm: Vec<f32>,
    /// Norm before the output projection.
    pub norm: Vec<f32>,
    /// The layer's own table of embeddings, if it does not use the model's.
    pub embedding: Option<Embedding>,
    /// The layer's own output projection, if it does not use the model's. Its chunks are the last dense blocks.
    pub head: Option<Vec<HeadChunk>>,
}

/// Appends the joining projection to the dense block of the predicting layer.
pub(super) fn join(
    architecture: &Architecture,
    names: &Names,
    tensors: &Tensors<'_>,
    dense: &mut Block,
) -> Result<PartMatrix, ModelError> {
    let (name, hidden) = (name(names, "join"), architecture.hidden);
    Ok(tensors.source(&name, hidden, 2 * hidden)?.push(dense))
}

fn name(names: &Names, role: &str) -> String {
    names.mtp(role).expect("every source has a name for the role")
}

impl MtpWeights {
    /// Reads the vectors, and appends the blocks of the layer's own output projection if it has one.
    ///
    /// # Errors
    /// Returns the errors of [`super::Weights::new`].
    pub(super) fn new(
        architecture: &Architecture,
        names: &Names,
        tensors: &mut Tensors<'_>,
        blocks: &mut ModelBlocks,
        join: PartMatrix,
    ) -> Result<MtpWeights, ModelError> {
        let of = architecture.mtp.expect("the model has a predicting layer");
        let hidden = architecture.hidden;
        let norm = if of.own_norm { name(names, "norm") } else { names.final_norm() };
        let embedding = match of.own_embedding {
            true => {
                let name = name(names, "embedding");
                Some(embedding(architecture.vocabulary, &name, hidden, tensors)?)
            }
            false => None,
        };
        let head = match of.own_head {
            true => Some(head(architecture, &name(names, "head"), tensors, blocks)?),
            false => None,
        };
        // Norms that subtract the mean have biases, which no file has here.
        let mut norm = tensors.norm(&norm, hidden)?;
        norm.resize(of.norm_form.weights(hidden), 0.0);
        Ok(MtpWeights {
            join,
            embedding_norm: tensors.norm(&name(names, "embedding_norm"), hidden)?,
            hidden_norm: tensors.norm(&name(names, "hidden_norm"), hidden)?,
            norm,
            embedding,
            head,
        })
    }
}
