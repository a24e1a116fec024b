//! `forebay config`: shows the settings in force and where they come from.

use forebay_engine::doctor::MachineProfile;
use forebay_library::{Library, Options};
use serde::Serialize;

use crate::args::ConfigArgs;
use crate::failure::Outcome;
use crate::output::{self, Align};
use crate::settings;

#[derive(Serialize)]
struct Row {
    setting: String,
    value: String,
    from: String,
}

#[derive(Serialize)]
struct Document {
    file: Option<String>,
    file_is_there: bool,
    settings: Vec<Row>,
}

/// `folder` is that of `--models`.
pub fn run(args: ConfigArgs, folder: Option<std::path::PathBuf>) -> Outcome {
    let rows = rows(folder.as_deref());
    let file = settings::path().map(|(path, _)| path.display().to_string());
    let file_is_there = settings::loaded().path.is_some();
    if args.json {
        return output::json(&Document { file, file_is_there, settings: rows });
    }
    let mut table = vec![["SETTING", "VALUE", "FROM"].map(String::from).to_vec()];
    table.extend(rows.into_iter().map(|row| vec![row.setting, row.value, row.from]));
    output::print(&output::table(&[Align::Left; 3], &table))?;
    match file {
        Some(file) if !file_is_there => {
            output::tell!("there is no configuration file: {file} would be read");
        }
        _ => {}
    }
    Ok(())
}

fn rows(folder: Option<&std::path::Path>) -> Vec<Row> {
    let row = |setting: &str, value: String, from: &str| Row {
        setting: setting.to_owned(),
        value,
        from: from.to_owned(),
    };
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
    let loaded = settings::loaded();
    let file = loaded.path.as_ref().map_or_else(String::new, |path| path.display().to_string());
    let mut rows = Vec::new();
    let usual = Library::default_folder().map_or_else(String::new, |of| of.display().to_string());
    rows.push(match (folder, variable("FOREBAY_MODELS"), settings::global("models")) {
        (Some(folder), ..) => row("models", folder.display().to_string(), "--models"),
        (None, Some(folder), _) => row("models", folder, "FOREBAY_MODELS"),
        (None, None, Some(folder)) => row("models", folder.to_owned(), &file),
        (None, None, None) => row("models", usual, "default"),
    });
    rows.push(match (variable("FOREBAY_LOG"), settings::global("log")) {
        (Some(level), _) => row("log", level, "FOREBAY_LOG"),
        (None, Some(level)) => row("log", level.to_owned(), &file),
        (None, None) => row("log", "warn".to_owned(), "default"),
    });
    let hub = Options::from_environment();
    let from = if variable("HF_ENDPOINT").is_some() { "HF_ENDPOINT" } else { "default" };
    rows.push(row("hub", hub.endpoint, from));
    let (token, from) = match (hub.token, variable("HF_TOKEN")) {
        (None, _) => ("none", "default"),
        (Some(_), Some(_)) => ("set", "HF_TOKEN"),
        (Some(_), None) => ("set", "the file of Hugging Face's tools"),
    };
    rows.push(row("hub token", token.to_owned(), from));
    if let Some(state) = MachineProfile::folders().first() {
        let from = match variable("XDG_STATE_HOME") {
            Some(_) => "XDG_STATE_HOME",
            None => "default",
        };
        rows.push(row("machine profiles", state.display().to_string(), from));
    }
    // A command's own value wins over that for all commands.
    let mut options: Vec<&settings::Setting> = Vec::new();
    for setting in loaded.set.iter().filter(|of| of.command.is_some()) {
        options.retain(|of| (&of.command, &of.option) != (&setting.command, &setting.option));
        options.push(setting);
    }
    options.sort_by_key(|of| (of.command.clone(), of.option.clone()));
    rows.extend(options.into_iter().map(|of| {
        let command = of.command.as_deref().unwrap_or_default();
        row(&format!("{command} --{}", of.option), of.values.join(", "), &file)
    }));
    rows
}
