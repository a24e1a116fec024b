//! The steps of a pass, for each way in which it gets its experts.

use forebay_cuda::{AddressTable, CudaError, DevicePtr, Gpu, Graph};

use super::super::graphs::SourceKey;
use super::super::memory::{Device, DeviceArena};
use super::{ExpertCache, ExpertWork, Fetching, replace_choice};
use crate::ModelError;
use crate::backend::{ChosenExperts, Step};
use crate::weights::Weights;

impl ExpertCache {
    /// Begins a pass of `rows` rows. Decides whether the CPU computes experts in it. Returns the cache's part of the key
    /// of the pass's CUDA graph, or `None` if so many decode rows cannot be one.
    pub fn begin(&mut self, rows: usize) -> Option<SourceKey> {
        self.fetching = Fetching::ByHost;
        let cpu_offloads = self.cpu.as_mut().is_some_and(|cpu| cpu.cpu_offload.decide());
        self.serves_rows(rows)
            .then(|| SourceKey { cpu_offloads, first_lane: self.first_lane(rows) })
    }

    /// Begins a pass that is a CUDA graph, with so many rows in all and in the first lane. Waits for copies of earlier passes.
    ///
    /// # Panics
    /// Panics if so many rows cannot run as CUDA graphs.
    pub fn begin_graph(
        &mut self,
        gpu: &Gpu,
        rows: (usize, usize),
        chosen: Option<&dyn ChosenExperts>,
    ) {
        self.fetching = Fetching::InGraph;
        self.begin_run(gpu, rows, chosen);
    }

    /// Queues the CUDA graph of the pass and answers its questions.
    ///
    /// # Errors
    /// Returns an error if a read or the device fails.
    pub fn run_graph(
        &mut self,
        on: Device<'_>,
        graph: &Graph,
        weights: &Weights,
    ) -> Result<(), ModelError> {
        self.upload_tables(on)?;
        on.gpu.queue_graph(graph)?;
        self.serve(on, weights)
    }

    /// Waits for the graph of the pass, if it has one that may give up. Returns the layer in which the graph gave up, if
    /// it did.
    ///
    /// # Errors
    /// Returns an error if a driver call or queued work failed.
    pub fn given_up(&self, gpu: &Gpu) -> Result<Option<usize>, CudaError> {
        match self.fetching {
            Fetching::ByHost => Ok(None),
            Fetching::InGraph | Fetching::AfterGraph => self.layer_given_up(gpu),
        }
    }

    /// Restores the residual stream of the layer in which the graph gave up. From now on, the host queues kernels one by
    /// one.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn resume(&mut self, on: Device<'_>) -> Result<(), CudaError> {
        self.fetching = Fetching::AfterGraph;
        self.restore_layer(on)
    }

    /// Takes the experts `ids` that a layer's router chose for the normed state `x` of a lane. Experts chosen by the caller
    /// replace them. Queues the kernel that fetches them, unless the host does.
    ///
    /// # Errors
    /// Returns an error if a read or the device fails.
    pub fn take_choice(
        &mut self,
        on: Device<'_>,
        step: &Step<'_>,
        lane: usize,
        ids: DevicePtr<u32>,
        x: DevicePtr<f32>,
    ) -> Result<(), ModelError> {
        match self.fetching {
            Fetching::ByHost => return Ok(replace_choice(on.gpu, step, ids)?),
            Fetching::InGraph => {}
            Fetching::AfterGraph => self.answer_beforehand(on, step, ids, x)?,
        }
        Ok(self.queue_fetch(on, (step.layer, lane), ids, x)?)
    }

    /// Copies the experts `ids` to `chosen`, if the host fetches them. Returns true if it does.
    ///
    /// # Errors
    /// Returns an error if a driver call or queued work failed.
    pub fn download_choice(
        &mut self,
        gpu: &Gpu,
        ids: DevicePtr<u32>,
        chosen: &mut [u32],
    ) -> Result<bool, CudaError> {
        match self.fetching {
            Fetching::ByHost => self.take_ids(gpu, ids, chosen).map(|()| true),
            Fetching::InGraph | Fetching::AfterGraph => Ok(false),
        }
    }

    /// Computes the chosen experts of a layer. `compute` queues the products of the experts that a table names.
    ///
    /// # Errors
    /// Returns an error of `compute`, or an error if a read or the device fails.
    pub fn compute(
        &mut self,
        on: Device<'_>,
        work: &ExpertWork<'_>,
        compute: impl Fn(AddressTable) -> Result<(), ModelError>,
    ) -> Result<(), ModelError> {
        let table = |index| on.arena.expert_tables().table(index);
        if self.fetching != Fetching::ByHost {
            // The kernel that fetches them has been queued.
            if self.fetches_beside() {
                compute(table(DeviceArena::present_table(on.plan, work.layer, work.lane)))?;
                self.service().side.join_mark(on.gpu, work.lane)?;
            }
            compute(table(DeviceArena::chosen_table(on.plan, work.layer, work.lane)))?;
            return Ok(self.queue_rows(on, work.layer, work.rows.outputs)?);
        }
        self.prefetch(on, work)?;
        while let Some(devices) = self.fetch(on)? {
            if devices.gpu {
                compute(table(work.layer))?;
            }
            if devices.cpu {
                self.compute_on_cpu(on.gpu, work)?;
            }
            self.release(on.gpu)?;
        }
        self.release_all();
        Ok(())
    }

    /// Passes the experts that the graph of the pass chose, `[rows, used]`, to `take`, layer by layer.
    pub fn graph_experts(&self, take: impl FnMut(usize, &[u32])) {
        match self.fetching {
            Fetching::ByHost => {}
            Fetching::InGraph | Fetching::AfterGraph => self.served_experts(take),
        }
    }
}
