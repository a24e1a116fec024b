//! `--trace-routing`: the file that a session writes its routing to, from its first token on.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};

use forebay_engine::{EngineError, Session};

use crate::args::RoutingArgs;
use crate::failure::{Failure, Outcome};
use crate::output;
use crate::pending::PendingFile;

/// The file under its temporary name, if one was asked for.
pub struct RoutingFile {
    file: Option<Shared>,
    scores: bool,
}

/// The session writes to it, and we give it its name.
#[derive(Clone)]
struct Shared(Arc<Mutex<PendingFile>>);

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).flush()
    }
}

impl RoutingFile {
    /// Creates the file, before the work.
    pub fn create(args: &RoutingArgs) -> Outcome<RoutingFile> {
        let file = args.trace_routing.as_deref().map(PendingFile::create).transpose()?;
        let file = file.map(|file| Shared(Arc::new(Mutex::new(file))));
        Ok(RoutingFile { file, scores: args.trace_scores })
    }

    /// Has the session recorded.
    pub fn record(&self, session: &mut Session) -> Outcome {
        let Some(file) = &self.file else { return Ok(()) };
        session.record_routing(Box::new(file.clone()), self.scores).map_err(|error| match error {
            EngineError::NoExperts | EngineError::NoScores => Failure::Usage(error.to_string()),
            error => Failure::Work(error.into()),
        })
    }

    /// Completes the trace and gives the file its name.
    pub fn finish(self, session: &mut Session) -> Outcome {
        let Some(Shared(file)) = self.file else { return Ok(()) };
        session.end_routing()?;
        let file = Arc::into_inner(file).expect("the session has let go of it");
        let file = file.into_inner().unwrap_or_else(PoisonError::into_inner);
        let path = file.destination().display().to_string();
        file.commit()?;
        output::tell!(
            "{path}: a trace of the routing; forebay replay shows what a cache makes of it"
        );
        Ok(())
    }
}
