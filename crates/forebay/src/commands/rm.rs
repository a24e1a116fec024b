//! `forebay rm`: removes models from the library.

use std::path::PathBuf;

use crate::args::RmArgs;
use crate::failure::Outcome;
use crate::{library, output};

pub fn run(args: RmArgs, folder: Option<PathBuf>) -> Outcome {
    let library = library::open(folder)?;
    for name in &args.names {
        library.remove(name).map_err(library::failed)?;
        output::tell!("removed {name}");
    }
    Ok(())
}
