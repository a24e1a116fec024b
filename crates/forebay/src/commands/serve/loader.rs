//! Opens models for `forebay serve` within the memory that they share.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use forebay_engine::plan::{ModelMemory, OpenGpu};
use forebay_engine::{
    DeviceChoice, Interrupt, RoutingSource, Session, SessionOptions, default_budget_bytes,
    free_bytes,
};
use forebay_server::{Entry, LoadError, Loaded, Loader, Memory, Outlook, PlanReport};
use forebay_text::Tokenizer;

use crate::args::Parallel;
use crate::failure::{Failure, Outcome};
use crate::open::{self, Sequences};
use crate::output;
use crate::session_plan::SessionPlan;

/// Least number of sequences that run together if `--parallel` is `auto` and memory has room for their contexts.
const PARALLEL: usize = 4;

/// Opens models with the options of the command line.
pub struct SessionLoader {
    options: SessionOptions,
    parallel: Parallel,
    kv_tokens: Option<usize>,
    /// True if there are several models, so that each may leave and come again.
    may_switch: bool,
    /// Routing that replaces that of the models.
    followed: Option<RoutingSource>,
    memory: Memory,
    /// Stays open between loads, so that the driver's context and the kernels stay.
    gpu: Mutex<Option<OpenGpu>>,
    /// What was found out about models.
    known: Mutex<HashMap<PathBuf, Arc<Known>>>,
}

/// What is the same for every load of a model.
struct Known {
    /// When the file or folder was changed last.
    modified: Option<SystemTime>,
    options: SessionOptions,
    sequences: Sequences,
    needs: Memory,
    plan: Arc<SessionPlan>,
    outlook: Outlook,
    file_bytes: u64,
}

impl SessionLoader {
    /// Finds out how much memory there is for all models.
    pub fn new(
        options: SessionOptions,
        parallel: Parallel,
        kv_tokens: Option<usize>,
        may_switch: bool,
        followed: Option<RoutingSource>,
    ) -> Outcome<SessionLoader> {
        let gpu = OpenGpu::open(&options);
        let vram_bytes = match &gpu {
            Some(gpu) => gpu.room_bytes(options.vram_bytes)?,
            None => 0,
        };
        let ram_bytes = options.ram_bytes.unwrap_or_else(default_budget_bytes);
        Ok(SessionLoader {
            options,
            parallel,
            kv_tokens,
            may_switch,
            followed,
            memory: Memory { vram_bytes, ram_bytes },
            gpu: Mutex::new(gpu),
            known: Mutex::default(),
        })
    }

    fn gpu(&self) -> MutexGuard<'_, Option<OpenGpu>> {
        self.gpu.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns what is known about a model, which is read if it is new or has changed.
    fn known(&self, path: &Path) -> Outcome<Arc<Known>> {
        open::check(path)?;
        let modified = std::fs::metadata(path).and_then(|of| of.modified()).ok();
        let lock = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = lock().get(path).filter(|known| known.modified == modified) {
            return Ok(known.clone());
        }
        let plan = SessionPlan::open(path).map_err(|error| open::named(error, path))?;
        let mut options = self.options.clone();
        let trained = plan.model.info.context_trained;
        if let Some(context) =
            options.context.filter(|context| self.may_switch && *context > trained)
        {
            // One option is for all models, which differ in what they were trained for.
            output::tell!(
                "{}: --ctx is {trained} instead of {context}, as it was trained",
                open::name(path)
            );
            options.context = Some(trained);
        }
        plan.follow(&mut options);
        let sequences = match self.parallel {
            Parallel::Fixed(number) => Sequences::Exactly(number),
            Parallel::Auto => {
                let best = plan.best_sequences(&options);
                Sequences::AtMost(best.unwrap_or(PARALLEL).max(PARALLEL))
            }
        };
        let (Sequences::Exactly(number) | Sequences::AtMost(number)) = sequences;
        let (kv_tokens, for_engine) = (self.kv_tokens, true);
        let whole = SessionOptions { sequences: number, kv_tokens, for_engine, ..options.clone() };
        let whole = plan.model.whole(&whole, self.gpu().as_ref());
        let needs = self.shared(whole.map_err(|error| open::refused(error.into(), path, "--ctx"))?);
        let known = Arc::new(Known {
            modified,
            sequences,
            needs,
            outlook: plan.outlook(&options),
            file_bytes: plan.model.info.file_bytes,
            plan: Arc::new(plan),
            options,
        });
        lock().insert(path.to_owned(), known.clone());
        Ok(known)
    }

    /// Returns the memory of a model that counts against what all models share. A RAM budget of the user is for weights
    /// only, as for one model.
    fn shared(&self, memory: ModelMemory) -> Memory {
        let keys_and_values = match self.options.ram_bytes {
            Some(_) => 0,
            None => memory.ram_kv_cache_bytes,
        };
        Memory { vram_bytes: memory.vram_bytes, ram_bytes: memory.ram_bytes + keys_and_values }
    }

    /// Returns the options for a model that gets `room`, or all memory if no other model is loaded.
    fn within(&self, known: &Known, room: Option<Memory>) -> Outcome<SessionOptions> {
        let mut options = known.options.clone();
        let gpu = self.gpu();
        let gpu = gpu.as_ref().filter(|_| known.needs.vram_bytes > 0);
        if let Some(gpu) = gpu.filter(|_| room.is_some() || options.vram_bytes.is_some()) {
            // Kernels of earlier models are in the driver's memory, and do not count against this model.
            let vram_bytes = room.unwrap_or(self.memory).vram_bytes;
            options.vram_bytes = Some(gpu.budget_bytes(vram_bytes)?);
        }
        if let Some(room) = room {
            options.ram_bytes = Some(room.ram_bytes);
            if gpu.is_some() && options.device == DeviceChoice::Auto {
                // With too little VRAM, it shall wait for more instead of running on the CPU.
                options.device = DeviceChoice::Cuda(0);
            }
        }
        Ok(options)
    }

    /// Returns true if a load shall leave the model's files in the page cache, from where the next load is much faster than
    /// from the disk. Models that continue to read from the disk would fill the page cache with what they have in memory.
    fn keeps_files_cached(&self, known: &Known, room: Option<Memory>) -> bool {
        let is_whole = known.needs.fits(room.unwrap_or(self.memory));
        let needed = known.file_bytes.saturating_add(known.needs.ram_bytes);
        self.may_switch && is_whole && needed <= default_budget_bytes()
    }

    /// Opens a model in at most `room` with `open`.
    pub fn open(
        &self,
        path: &Path,
        room: Option<Memory>,
        change: impl FnOnce(&mut SessionOptions),
        open: impl Fn(&SessionOptions) -> Outcome<Session>,
    ) -> Outcome<Loaded> {
        let known = self.known(path)?;
        let mut options = self.within(&known, room)?;
        options.direct = !self.keeps_files_cached(&known, room);
        let report = report(known.plan.clone(), options.clone());
        change(&mut options);
        let mut session = open::for_engine(&options, known.sequences, &|_| self.kv_tokens, &open)?;
        if let Some(source) = &self.followed {
            session.follow_routing(source.clone())?;
        }
        let memory = self.shared(session.memory());
        let predicted = known.plan.predicted(&session);
        let outlook = Arc::new(Outlook { predicted, report, ..known.outlook.clone() });
        Ok(Loaded { session, memory, outlook })
    }

    /// Returns the memory that a whole model takes.
    pub fn whole(&self, path: &Path) -> Outcome<Memory> {
        Ok(self.known(path)?.needs)
    }
}

/// Returns what makes the planner's report for a model that is opened with these options now.
fn report(plan: Arc<SessionPlan>, options: SessionOptions) -> PlanReport {
    let free_bytes = free_bytes();
    PlanReport::new(move || plan.report(&options, free_bytes))
}

/// Returns a failure for those who asked for the model.
fn refused(failure: Failure) -> LoadError {
    let why = failure.line().unwrap_or_else(|| "interrupted".to_owned());
    match failure {
        Failure::Work(error) if open::is_too_small(&error) => LoadError::TooSmall(why),
        _ => LoadError::Failed(why),
    }
}

impl Loader for SessionLoader {
    fn memory(&self) -> Memory {
        self.memory
    }

    fn needs(&self, entry: &Entry) -> Result<Memory, LoadError> {
        self.whole(&entry.path).map_err(refused)
    }

    fn load(
        &self,
        entry: &Entry,
        room: Option<Memory>,
        tokenizer: Option<Arc<Tokenizer>>,
    ) -> Result<Loaded, LoadError> {
        let change = |options: &mut SessionOptions| {
            options.tokenizer = tokenizer;
            // A signal ends the server when its answers are finished, those of this model, too.
            options.interrupt = Interrupt::new();
        };
        let open = |options: &SessionOptions| open::quietly(&entry.path, options);
        self.open(&entry.path, room, change, open).map_err(refused)
    }

    fn forget(&self) {
        let mut gpu = self.gpu();
        // The driver's context ends with its last user, and a new one has none of its errors.
        *gpu = None;
        *gpu = OpenGpu::open(&self.options);
    }
}
