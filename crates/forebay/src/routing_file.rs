//! Files of routing: that of `--trace-routing`, to which a session writes its routing from its first token on, and that of
//! `--routing-trace`, whose routing a session follows.

use forebay_engine::{EngineError, RoutingError, RoutingSource, Session};
use forebay_store::{Outputs, SharedStream};

use crate::args::{FollowedArgs, RoutingArgs};
use crate::commands::replay;
use crate::failure::{Failure, Outcome};
use crate::output;
use crate::outputs;

/// The file of the trace, if one was asked for. It gets its name when it is complete.
pub struct RoutingFile {
    file: Option<SharedStream>,
    scores: bool,
}

/// Returns the routing that replaces the model's own, if there is one.
pub fn followed(args: &FollowedArgs) -> Outcome<Option<RoutingSource>> {
    if let Some(profile) = args.routing_profile {
        return Ok(Some(RoutingSource::Profile(profile)));
    }
    let Some(path) = &args.routing_trace else { return Ok(None) };
    if path.as_os_str() == "uniform" {
        return Ok(Some(RoutingSource::Uniform));
    }
    let trace = Box::new(replay::open(path)?);
    Ok(Some(match args.unrelated {
        true => RoutingSource::Unrelated(trace),
        false => RoutingSource::Trace(trace),
    }))
}

impl RoutingFile {
    /// Creates the file before the work starts.
    pub fn create(args: &RoutingArgs, outputs: &mut Outputs) -> Outcome<RoutingFile> {
        let mut file = None;
        if let Some(path) = &args.trace_routing {
            outputs::not_standard("--trace-routing", path, "the result of the command")?;
            let stream = outputs::create(outputs, path)?.into_stream();
            file = Some(SharedStream::new(stream));
        }
        Ok(RoutingFile { file, scores: args.trace_scores })
    }

    /// Makes the session record its routing to the file.
    pub fn record(&self, session: &mut Session) -> Outcome {
        let Some(file) = &self.file else { return Ok(()) };
        session.record_routing(Box::new(file.clone()), self.scores).map_err(|error| match error {
            EngineError::Routing(RoutingError::NoExperts | RoutingError::NoScores) => {
                Failure::Usage(error.to_string())
            }
            error => Failure::Work(error.into()),
        })
    }

    /// Completes the trace and gives the file its name.
    pub fn finish(self, session: &mut Session) -> Outcome {
        let Some(file) = self.file else { return Ok(()) };
        session.end_routing()?;
        let file = file.into_inner().expect("the session has let go of it");
        let path = file.path().display().to_string();
        file.commit()?;
        output::tell!(
            "{path}: routing trace; forebay replay shows the hit rates of any cache on it"
        );
        Ok(())
    }
}
