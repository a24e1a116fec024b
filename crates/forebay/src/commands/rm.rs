//! `forebay rm`: removes models from the library.

use std::path::PathBuf;

use forebay_library::{Error, Others};

use crate::args::RmArgs;
use crate::failure::Outcome;
use crate::{library, output};

pub fn run(args: RmArgs, folder: Option<PathBuf>) -> Outcome {
    let library = library::open(folder)?;
    for name in &args.names {
        if Others::is_name(name) {
            let why = format!("{name} belongs to another program: remove it there");
            return Err(anyhow::anyhow!(why).into());
        }
        library.remove(name).map_err(|error| match library.find(name) {
            Ok(entry) if error.is_not_found() || matches!(error, Error::BadName { .. }) => {
                let path = entry.path.display();
                anyhow::anyhow!(
                    "{name} was not pulled, but lies in the folder: delete {path} yourself"
                )
                .into()
            }
            _ => library::failed(error),
        })?;
        output::tell!("removed {name}");
    }
    Ok(())
}
