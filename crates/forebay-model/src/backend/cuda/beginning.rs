//! Start of a batch on a GPU. If VRAM has no room for the embedding table, the tokens' rows are read from the file.

use forebay_cuda::{Added, DeltaRuns, EmbeddingTable, NO_STATE, Norm, Normed, PromptRun};
use forebay_ops::RowKind;

use super::backend::CudaBackend;
use super::exchange::KvPlace;
use super::graphs::GraphKey;
use super::lanes::PassLanes;
use super::layout::EmbeddingLocation;
use crate::ModelError;
use crate::arch::Attention;
use crate::backend::{Batch, Begun, End, Run, Step};

impl CudaBackend {
    /// Writes the embeddings of the batch's tokens to the residual stream, unless a CUDA graph does so.
    pub fn begin_batch(&mut self, step: &Step<'_>, batch: &Batch<'_>) -> Result<Begun, ModelError> {
        assert!(step.decode == 0 || step.decode == step.count, "mixed rows");
        let is_decode = step.kind() == RowKind::Decode;
        assert!(step.runs.len() <= self.at().decode_rows, "{} runs", step.runs.len());
        // A failed batch may have left a capture that did not end.
        self.graphs.abandon(&self.gpu);
        self.lanes.begin(&self.gpu);
        // `take` waits for work of an earlier batch, so all pinned memory is free afterwards.
        let ids = self.embedding_rows.as_ref().map_or(batch.tokens, |rows| &rows.ids[..step.count]);
        self.exchange.take(&self.gpu, ids, places(step.runs))?;
        if !step.states.is_empty() {
            self.exchange.take_state_runs(state_runs(step));
        }
        if !is_decode {
            self.take_prompts(step);
        }
        self.tables.queue(&self.gpu, &self.plan.kv, self.arena.kv(0))?;
        let resumes = batch.first_layer > 0;
        // A pass that goes on has its stream, but not what its layers take of the embeddings.
        let has_layer_rows = self.layer_rows.is_some();
        if let Some(rows) = self.embedding_rows.as_mut().filter(|_| !resumes || has_layer_rows) {
            rows.read(batch.tokens)?;
        }
        if let Some(rows) = &mut self.layer_rows {
            rows.read(batch.tokens)?;
        }
        self.read_ngrams(step, batch)?;
        // All logits of several rows are copied row by row, which is no work for a graph.
        let few_results = step.count == 1 || matches!(batch.end, End::Largest(_) | End::Selected);
        let fits = is_decode && few_results && step.outputs.len() == step.count;
        let fits = fits && !self.depends_on_sorted_heads(step);
        let source = self.source.begin(&self.gpu, step, batch)?.filter(|_| fits);
        let splits = self.cut_contexts(step);
        let key = source.map(|mut source| {
            let lane_rows = self.at().lane_rows();
            let may_split = step.runs.len() == step.count;
            source.first_lane = source.first_lane.filter(|&rows| may_split && rows <= lane_rows);
            GraphKey { rows: step.count, splits, end: batch.end, source }
        });
        let is_replayed = self.graphs.begin(key);
        let first_lane = self.graphs.key().and_then(|key| key.source.first_lane);
        if let Some(first) = first_lane {
            self.lanes.split(first, step.architecture);
        }
        if is_replayed || self.graphs.is_capturing() {
            let rows = (step.count, first_lane.unwrap_or(step.count));
            self.source.begin_graph(&self.gpu, rows, batch.chosen);
        }
        let forks = first_lane.is_some() && self.graphs.is_capturing();
        if forks {
            PassLanes::load(&self.gpu, step.weights)?;
        }
        self.graphs.begin_capture(&self.gpu)?;
        if self.graphs.is_capturing() {
            let (source, on) = self.source_and_device();
            source.queue_graph_input(on)?;
        }
        if is_replayed {
            return Ok(Begun::Recorded);
        }
        self.exchange.queue_up(&self.gpu)?;
        self.embed_for_layers(step)?;
        self.embed_ngrams(step)?;
        match resumes {
            true => self.copy_stream(step, self.at().paused, self.at().x)?,
            false if step.architecture.streams.is_some() => self.embed_streams(step)?,
            false => self.embed_normed(step)?,
        }
        if forks {
            self.lanes.fork(&self.gpu)?;
        }
        Ok(Begun::Layers)
    }

    /// Takes what a pass of prompts needs beside its rows.
    pub(super) fn take_prompts(&mut self, step: &Step<'_>) {
        let shapes = step.architecture.attentions.iter().zip(&self.plan.kv.shapes);
        let gpu = &self.gpu;
        let cut =
            shapes.map(|(of, shape)| gpu.prompt_tiles(shape, of.heads, prompt_runs(step.runs)));
        self.exchange.take_prompts(cut, step.outputs);
    }

    /// Returns true if products of several rows read the row order by head, which other passes replace. A CUDA graph cannot then.
    fn depends_on_sorted_heads(&self, step: &Step<'_>) -> bool {
        let has_heads = |of: &Attention| of.latent.is_some() || of.shared.is_some();
        step.count > 1
            && !self.products().takes_matvec(step.kind())
            && step.architecture.attentions.iter().any(has_heads)
    }

    /// Queues the embeddings of the rows' tokens, normed if the model norms them.
    fn embed_normed(&self, step: &Step<'_>) -> Result<(), ModelError> {
        self.embed(step, self.at().x)?;
        let Some(weight) = self.plan.vectors.embedding_norm else { return Ok(()) };
        let norm = Norm {
            weight: self.vectors().offset(weight),
            width: step.architecture.hidden,
            epsilon: step.architecture.norm_epsilon,
        };
        let x = self.float(self.at().x);
        Ok(self.gpu.rms_norm(x, Added::Nothing, &norm, Normed::plain(x), step.count, None)?)
    }

    pub(super) fn embed(&self, step: &Step<'_>, to: u64) -> Result<(), ModelError> {
        let embedding = &step.weights.embedding;
        let (data, vocabulary) = match (self.plan.weights.embedding, &self.embedding_rows) {
            (_, Some(rows)) => (rows.words.device(0).cast(), step.count),
            (EmbeddingLocation::Table(at), None) => {
                (self.arena.dense(at), step.architecture.vocabulary)
            }
            (_, None) => (self.arena.dense(self.plan.weights.head), step.architecture.vocabulary),
        };
        let hidden = step.architecture.hidden;
        let table = EmbeddingTable { ty: embedding.ty, data, vocabulary, hidden };
        let (ids, x) = (self.exchange.tokens(), self.float(to));
        self.gpu.embed(&table, ids, x, step.count, step.architecture.embedding_scale)?;
        Ok(())
    }
}

/// Returns where the rows of runs belong in the KV cache.
pub(super) fn places(runs: &[Run]) -> impl Iterator<Item = KvPlace> {
    runs.iter().flat_map(|run| {
        let table = run.table as u32;
        let positions = run.position..run.position + run.count;
        positions.map(move |position| KvPlace { position: position as u32, table })
    })
}

/// Returns the runs of a pass of prompts, as the kernels' side names them.
fn prompt_runs(runs: &[Run]) -> impl Iterator<Item = PromptRun> {
    runs.iter().scan(0, |rows, &Run { table, position, count, .. }| {
        let first = *rows;
        *rows += count;
        Some(PromptRun { first, count, position, table })
    })
}

/// Returns the runs of a pass with their states, as the kernels of recurrent layers read them.
fn state_runs(step: &Step<'_>) -> impl Iterator<Item = [u32; DeltaRuns::WORDS]> {
    let firsts = prompt_runs(step.runs).map(|run| run.first as u32);
    firsts.zip(step.runs).zip(step.states).map(|((first, run), places)| {
        let from = places.from.map_or(NO_STATE, |from| from as u32);
        [first, run.count as u32, from, places.to as u32]
    })
}
