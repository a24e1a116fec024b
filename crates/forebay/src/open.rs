//! Opening a session, the same way for every command that computes.

use std::path::Path;

use anyhow::Context as _;
use forebay_engine::{EngineError, Session, SessionOptions};

use crate::failure::{Failure, Outcome};
use crate::progress::BytesProgress;

/// Opens a model with a progress bar for its loading. An option that does not suit the model is
/// wrong usage, everything else failed work.
pub fn session(model: &Path, options: &SessionOptions) -> Outcome<Session> {
    let mut progress = BytesProgress::new("reading weights");
    let opened = Session::open(model, options, &mut |done, total| progress.update(done, total));
    drop(progress);
    match opened {
        Ok(session) => Ok(session),
        Err(error @ EngineError::BadOption { .. }) => Err(Failure::Usage(error.to_string())),
        Err(error) => {
            let context = model.display().to_string();
            Err(Err::<(), _>(error).context(context).unwrap_err().into())
        }
    }
}
