//! End of a batch on a GPU: the logits, the queueing of its CUDA graph, and the wait for its results.

use forebay_cuda::{CudaError, DECODE_ROWS, DevicePtr, EmbeddingTable, TopK, TopKBuffers};
use forebay_format::TensorType;
use forebay_ops::RowKind;

use super::backend::CudaBackend;
use super::kv_size::HEAD_ROWS;
use super::memory::Device;
use super::products::{Product, Rows};
use super::source::WeightSource;
use crate::ModelError;
use crate::backend::{Backend, End, NextBlock, Selector, Step};
use crate::sampling::Largest;
use crate::weights::{PartMatrix, Weights};

const _: () = assert!(HEAD_ROWS <= DECODE_ROWS, "rows of logits may be decode rows");

impl CudaBackend {
    /// Queues the logits of `rows` of the wanted rows `x`, starting at row `from`.
    fn queue_head_rows(
        &self,
        step: &Step<'_>,
        x: DevicePtr<f32>,
        from: usize,
        rows: usize,
    ) -> Result<(), ModelError> {
        let vocabulary = step.architecture.vocabulary;
        let (chunks, first) = step.head();
        let matrix = PartMatrix { rows: vocabulary, ..chunks[0].matrix };
        let is_own = first > step.weights.layers.len();
        let own = self.plan.weights.mtp_head.filter(|_| is_own);
        let data = self.arena.dense(own.unwrap_or(self.plan.weights.head));
        let out = self.exchange.logits();
        let x = x.offset(from * step.architecture.hidden);
        let of_step = Rows { kind: step.kind(), count: rows };
        self.products().dense(&self.gpu, x, of_step, &[Product { matrix, data, out }])?;
        if let Some(bias) = self.plan.vectors.head_bias {
            self.gpu.add_bias_rows(out, self.vectors().offset(bias), rows, vocabulary)?;
        }
        if let Some(cap) = step.architecture.logit_softcap {
            self.gpu.softcap(out, rows, vocabulary, cap)?;
        }
        let flag = self.finite_flag(2 * step.architecture.layers.len(), from);
        self.gpu.check_finite(out, rows, vocabulary, flag)?;
        Ok(())
    }

    /// Returns the rows of the normed stream whose logits are wanted, one after the other. Queues a copy of them if others are
    /// between them, as in a pass of several prompts.
    fn queue_wanted(&self, step: &Step<'_>) -> Result<DevicePtr<f32>, ModelError> {
        let (hidden, rows) = (step.architecture.hidden, step.outputs.len());
        let normed = self.float(self.at().normed);
        let (first, last) = (step.outputs[0] as usize, step.outputs[rows - 1] as usize);
        if last - first + 1 == rows {
            return Ok(normed.offset(first * hidden));
        }
        assert_eq!(step.kind(), RowKind::Prompt, "all decode rows have logits");
        let (ty, data, vocabulary) = (TensorType::F32, normed.cast(), step.count);
        let table = EmbeddingTable { ty, data, vocabulary, hidden };
        // The output of the last layer is in the residual stream already.
        let wanted = self.float(self.at().block_out);
        self.gpu.embed(&table, self.exchange.wanted(), wanted, rows, 1.0)?;
        self.products().changed(wanted);
        Ok(wanted)
    }

    /// Ends a pass with the largest logits of the wanted rows, or with all logits of a single one, and waits for them.
    pub(super) fn finish_rows(&mut self, step: &Step<'_>, end: End) -> Result<(), ModelError> {
        if !self.graphs.is_replayed() {
            self.queue_end(step, end)?;
        }
        self.queue_recorded(step.weights)?;
        self.resume(step, end)?;
        self.check(step)
    }

    /// Queues the last norm, the logits of the wanted rows (the largest, or all of a single row), and their copy to the
    /// host.
    pub(super) fn queue_end(&mut self, step: &Step<'_>, end: End) -> Result<(), ModelError> {
        self.norm(step, NextBlock::Head, true)?;
        if self.lanes.forked().is_some() {
            let (source, on) = self.source_and_device();
            source.end_lane(on)?;
            self.lanes.join(&self.gpu)?;
            // The other lane has written rows, too.
            self.products().changed(self.float(self.at().normed));
        }
        let rows = step.outputs.len();
        let x = self.queue_wanted(step)?;
        self.queue_head_rows(step, x, 0, rows)?;
        match end {
            // The selection follows, once it is known.
            End::Selected => return Ok(()),
            End::Largest(count) => {
                let what = TopK { rows, vocabulary: step.architecture.vocabulary, k: count };
                self.gpu.top_k(&what, &self.top_k_buffers(&what), None)?;
            }
            End::Nothing | End::Logits => {}
        }
        Ok(self.exchange.queue_down(&self.gpu, end, rows)?)
    }

    fn top_k_buffers(&self, what: &TopK) -> TopKBuffers {
        let ids = self.exchange.largest();
        TopKBuffers {
            logits: self.exchange.logits(),
            scratch: self.arena.activation(self.at().top_k_scratch),
            ids,
            values: ids.offset(what.rows * what.k).cast(),
        }
    }

    /// Ends a pass with what the selector wants of the wanted rows.
    pub(super) fn finish_selected(
        &mut self,
        step: &Step<'_>,
        selector: &mut dyn Selector,
    ) -> Result<(), ModelError> {
        if !self.graphs.is_replayed() {
            self.queue_end(step, End::Selected)?;
        }
        self.queue_recorded(step.weights)?;
        self.resume(step, End::Selected)?;
        let (rows, vocabulary) = (step.outputs.len(), step.architecture.vocabulary);
        let selections = selector.selections(rows);
        let counts: Vec<usize> = selections.iter().map(|row| row.count.min(vocabulary)).collect();
        let what = TopK { rows, vocabulary, k: counts.iter().copied().max().unwrap_or(1) };
        let buffers = self.top_k_buffers(&what);
        let totals = buffers.values.offset(rows * what.k);
        let selections = self.selections.queue_up(&self.gpu, &selections, totals)?;
        self.gpu.top_k(&what, &buffers, Some(&selections))?;
        self.exchange.queue_selected(&self.gpu, what.k, rows)?;
        self.check(step)?;
        let mut largest = Vec::new();
        self.exchange.append_largest(what.k, rows, &mut largest);
        for (row, (largest, count)) in largest.chunks(what.k).zip(counts).enumerate() {
            // Where there are no more candidates, an id stands that no token has.
            let found = largest[..count].partition_point(|(_, id)| (*id as usize) < vocabulary);
            let total = self.exchange.total(what.k, rows, row);
            let is_all = found < count;
            if selector.take(Largest { logits: &largest[..found], is_all, total }) {
                let mut logits = vec![0.0; vocabulary];
                let own = buffers.logits.offset(row * vocabulary);
                self.gpu.download_into(own, &mut logits)?;
                selector.take_all(logits);
            }
        }
        Ok(())
    }

    /// Queues the CUDA graph of the current batch, if it has one, and answers the graph's questions.
    fn queue_recorded(&mut self, weights: &Weights) -> Result<(), ModelError> {
        let CudaBackend { gpu, plan, arena, graphs, source, .. } = self;
        let Some(graph) = graphs.finish(gpu)? else { return Ok(()) };
        source.run_graph(Device { gpu, plan, arena }, graph, weights)
    }

    /// Waits for the batch and reports values that its kernels found not to be finite.
    fn check(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        self.source.end(&self.gpu)?;
        self.exchange.wait(&self.gpu, &mut self.flags)?;
        self.report_flags(step, usize::MAX)
    }

    /// Returns an error if the flags on the host report values that are not finite in layers up to number `last`.
    /// Ignores the feed-forward of layer `last`.
    pub(super) fn report_flags(&self, step: &Step<'_>, last: usize) -> Result<(), ModelError> {
        let batch = self.at().batch;
        let layers = step.architecture.layers.len();
        let first_rows = self.lanes.first_rows();
        let found = self.flags.chunks(1 + layers).zip(first_rows).flat_map(|(flags, first_row)| {
            // Every layer has two blocks. The logits are the last block.
            let stream = Some(flags[0] as usize).filter(|_| flags[0] != u32::MAX);
            let stream = stream.map(|tag| (tag / batch, first_row + tag % batch));
            let stream = stream.filter(|(block, _)| *block <= last.saturating_mul(2));
            let router = flags[1..].iter().position(|token| *token != u32::MAX);
            let router = router.filter(|layer| *layer <= last);
            let router = router.map(|layer| (layer, first_row + flags[1 + layer] as usize));
            stream.map(|(block, row)| (block / 2, row)).into_iter().chain(router)
        });
        match found.min() {
            None => Ok(()),
            Some((layer, row)) => {
                // Rows of logits are counted among those that are wanted.
                let row = if layer < layers { row } else { step.outputs[row] as usize };
                Err(ModelError::NumericFailure { layer, token: step.position_of(row) })
            }
        }
    }

    /// Ends a pass with all logits of the wanted rows, which it appends to `logits`.
    pub(super) fn finish_logits(
        &mut self,
        step: &Step<'_>,
        logits: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        let (vocabulary, wanted) = (step.architecture.vocabulary, step.outputs.len());
        if wanted == 1 {
            self.finish_rows(step, End::Logits)?;
            self.exchange.append_row(logits);
            return Ok(());
        }
        self.norm(step, NextBlock::Head, true)?;
        let x = self.queue_wanted(step)?;
        for from in (0..wanted).step_by(HEAD_ROWS) {
            let rows = HEAD_ROWS.min(wanted - from);
            self.queue_head_rows(step, x, from, rows)?;
            let base = logits.len();
            logits.resize(base + rows * vocabulary, 0.0);
            self.gpu.download_into(self.exchange.logits(), &mut logits[base..])?;
        }
        self.exchange.queue_down(&self.gpu, End::Nothing, 0)?;
        self.check(step)
    }

    /// Pauses a pass: completes the residual stream and keeps a copy of it.
    pub(super) fn pause_pass(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        assert!(self.can_pause(), "a pass that cannot pause");
        // A prediction of streams belongs to the next layer.
        let block = match step.architecture.active_stream() {
            Some(_) => NextBlock::NGrams,
            None => NextBlock::Attention,
        };
        self.norm(step, block, true)?;
        self.copy_stream(step, self.at().x, self.at().paused)?;
        self.exchange.queue_down(&self.gpu, End::Nothing, 0)?;
        self.check(step)
    }

    /// Returns true if passes can pause. A layer ring is always used in the order of the layers.
    pub(super) fn can_pause(&self) -> bool {
        self.plan.kv.sequences() > 1 && !matches!(self.source, WeightSource::LayerRing(_))
    }

    /// Queues a copy of the residual stream of a pass's rows.
    pub(super) fn copy_stream(&self, step: &Step<'_>, from: u64, to: u64) -> Result<(), CudaError> {
        let bytes = 4 * step.count * self.at().stream_width;
        self.gpu.copy(self.float(from).cast(), self.float(to).cast(), bytes)
    }

    /// Ends a pass of which no logits are wanted.
    pub(super) fn finish_without_logits(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        self.norm(step, NextBlock::Head, true)?;
        self.exchange.queue_down(&self.gpu, End::Nothing, 0)?;
        self.check(step)
    }
}
