//! `forebay man` writes a manual page for every command.

use anyhow::Context as _;

use crate::args::{self, ManArgs};
use crate::failure::Outcome;
use crate::{output, outputs};

pub fn run(args: ManArgs) -> Outcome {
    let mut command = args::command();
    // Names such as forebay-run are set now.
    command.build();
    let mut pages = vec![("forebay".to_owned(), command.clone())];
    for of in command.get_subcommands().filter(|of| !of.is_hide_set() && of.get_name() != "help") {
        pages.push((format!("forebay-{}", of.get_name()), of.clone()));
    }
    std::fs::create_dir_all(&args.folder)
        .with_context(|| format!("{}: the folder cannot be made", args.folder.display()))?;
    let mut outputs = outputs::begin(args.force, true)?;
    let mut files = Vec::new();
    for (name, command) in pages {
        let file = outputs::create(&mut outputs, &args.folder.join(format!("{name}.1")))?;
        let mut page = Vec::new();
        clap_mangen::Man::new(command).render(&mut page)?;
        file.write_at(0, &page)?;
        files.push(file);
    }
    let count = files.len();
    for file in files {
        file.commit()?;
    }
    output::tell!("{count} pages in {}", args.folder.display());
    Ok(())
}
