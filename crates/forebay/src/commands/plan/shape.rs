//! Plans for models of known shapes. No file of such a model is needed.

use std::path::PathBuf;

use anyhow::Context as _;
use forebay_engine::plan::PlannedModel;
use forebay_lab::synth::{self, SynthError, SynthOptions};

use super::{Asked, refused};
use crate::args::PlanArgs;
use crate::failure::{Failure, Outcome, usage};
use crate::{library, output};

/// Runs `plan --shape`. An empty name lists the shapes.
pub fn run(args: &PlanArgs, name: &str, models: Option<PathBuf>) -> Outcome {
    let known: Vec<&str> = synth::architectures().collect();
    if name.is_empty() {
        return match args.json {
            true => output::json(&known),
            false => output::print(&format!("{}\n", known.join("\n"))),
        };
    }
    if !known.contains(&name) {
        return usage(format!(
            "--shape: there is no shape '{name}'; there are: {}",
            known.join(", ")
        ));
    }
    let folder = tempfile::tempdir().context("a folder for a hollow file cannot be made")?;
    let file = folder.path().join(format!("{name}.gguf"));
    let options =
        SynthOptions { quantisation: args.quantisation.clone(), ..SynthOptions::default() };
    synth::hollow(name, &file, &options).map_err(|error| match error {
        error @ SynthError::UnknownQuantisation { .. } => Failure::Usage(error.to_string()),
        error => error.into(),
    })?;
    let model = PlannedModel::open(&file).map_err(|error| refused(error, name.as_ref()))?;
    let asked = Asked::new(args, &library::nearest_folder(models)?)?;
    let answered = asked.plan(&model).map_err(|error| refused(error, name.as_ref()))?;
    let mut info = model.info.clone();
    info.path = name.into();
    match args.json {
        true => output::json(&asked.document(None, &info, &answered)?),
        false => asked.tell(&info, &answered),
    }
}
