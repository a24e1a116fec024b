//! Rules about the files that a command may write: those of [`forebay_store::Outputs`], with the files of models as
//! inputs.

use std::path::Path;

use forebay_store::{OutputError, OutputFile, Outputs};

use crate::failure::{Outcome, usage};
use crate::interrupt;

/// Returns the outputs of a command. `named` says that the command line names an output. Otherwise `--force` has no
/// effect and is refused.
pub fn begin(force: bool, named: bool) -> Outcome<Outputs> {
    if force && !named {
        return usage("--force replaces an output that exists: name an output, too");
    }
    Ok(Outputs::new(force))
}

/// Creates an output. Opening a pipe waits for its reader, and Ctrl-C ends this wait.
pub fn create(outputs: &mut Outputs, path: &Path) -> Result<OutputFile, OutputError> {
    let _waiting = interrupt::waiting_for_input();
    outputs.create(path)
}

/// Forbids writing to any file of a model.
pub fn protect_model(outputs: &mut Outputs, model: &Path) {
    for file in forebay_format::model_files(model) {
        outputs.protect(&file);
    }
}

/// Returns true if an output goes to standard output.
pub fn is_standard(path: &Path) -> bool {
    path == Path::new("-") || path == Path::new("/dev/stdout")
}

/// Refuses standard output for `option` because `other` goes there.
pub fn not_standard(option: &str, path: &Path, other: &str) -> Outcome {
    if is_standard(path) {
        return usage(format!(
            "{option} {}: {other} goes to standard output: name a file",
            path.display()
        ));
    }
    Ok(())
}

/// Returns the name of an output in messages.
pub fn shown(path: &Path) -> String {
    match is_standard(path) {
        true => "standard output".into(),
        false => path.display().to_string(),
    }
}
