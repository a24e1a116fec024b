//! The command `forebay ps`: lists the models that a server has loaded.

use anyhow::anyhow;
use forebay_server::client::{self, AskError};
use serde::Deserialize;
use serde_json::Value;

use crate::args::PsArgs;
use crate::failure::{Failure, Outcome};
use crate::output::{self, Align};
use crate::size;
use crate::text_input;

/// Server to ask if nothing names another.
const SERVER: &str = "127.0.0.1:8080";

/// A loaded model in the server's answer.
#[derive(Deserialize)]
struct Model {
    name: String,
    size: u64,
    size_vram: u64,
    size_ram: u64,
    expires_seconds: Option<f64>,
    requests_running: u64,
    requests_waiting: u64,
}

pub fn run(args: PsArgs) -> Outcome {
    let server = match args.server {
        Some(server) => server,
        None => std::env::var("FOREBAY_HOST").unwrap_or_else(|_| SERVER.to_owned()),
    };
    let key = args.api_key_file.as_ref().map(|file| {
        let text = text_input::keys(file)?;
        let keys = text.lines().map(str::trim);
        let key = keys.into_iter().find(|line| !line.is_empty() && !line.starts_with('#'));
        key.map(str::to_owned).ok_or_else(|| anyhow!("{}: there is no key", file.display()))
    });
    let key = key.transpose()?;
    let answer = client::get(&server, "/api/ps", key.as_deref()).map_err(|error| match error {
        AskError::Address { .. } => Failure::Usage(error.to_string()),
        error => error.into(),
    })?;
    if args.json {
        return output::json(&answer);
    }
    let models: Vec<Model> =
        serde_json::from_value(answer.get("models").unwrap_or(&Value::Null).clone())
            .map_err(|_| anyhow!("{server}: the answer is that of another kind of server"))?;
    output::print(&table(&models))
}

fn table(models: &[Model]) -> String {
    let head = ["name", "size", "VRAM", "RAM", "until", "requests"].map(str::to_owned).to_vec();
    let row = |model: &Model| {
        let (running, waiting) = (model.requests_running, model.requests_waiting);
        vec![
            model.name.strip_suffix(":latest").unwrap_or(&model.name).to_owned(),
            size::format(model.size),
            size::format(model.size_vram),
            size::format(model.size_ram),
            until(running + waiting, model.expires_seconds),
            match waiting {
                0 => format!("{running} running"),
                waiting => format!("{running} running, {waiting} waiting"),
            },
        ]
    };
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(models.iter().map(row)).collect();
    let [left, right] = [Align::Left, Align::Right];
    output::table(&[left, right, right, right, left, left], &rows)
}

/// Describes how long a model stays if nobody asks for it.
fn until(requests: u64, seconds: Option<f64>) -> String {
    match seconds {
        None => "another model needs its room".to_owned(),
        Some(seconds) => {
            let seconds = seconds.max(0.0) as u64;
            let time = match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
                (0, 0, seconds) => format!("{seconds} s"),
                (0, minutes, seconds) => format!("{minutes} min {seconds} s"),
                (hours, minutes, _) => format!("{hours} h {minutes} min"),
            };
            if requests > 0 { format!("{time} after its requests") } else { format!("in {time}") }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_of_models() {
        let model = |name: &str, expires_seconds, requests_running| Model {
            name: name.to_owned(),
            size: 3 << 30,
            size_vram: 2 << 30,
            size_ram: 1 << 30,
            expires_seconds,
            requests_running,
            requests_waiting: 0,
        };
        let models = [model("a:latest", Some(299.9), 0), model("hf/b:Q4", None, 2)];
        let expected = "\
name         size      VRAM       RAM  until                         requests
a        3.00 GiB  2.00 GiB  1.00 GiB  in 4 min 59 s                 0 running
hf/b:Q4  3.00 GiB  2.00 GiB  1.00 GiB  another model needs its room  2 running
";
        assert_eq!(table(&models), expected);
        assert_eq!(until(1, Some(3700.0)), "1 h 1 min after its requests");
        assert_eq!(until(0, Some(-1.0)), "in 0 s");
    }
}
