//! `forebay assess --kv`: how small a prefix cache can be for a log of requests.

use std::path::Path;

use anyhow::anyhow;
use forebay_engine::{KvCacheType, SessionOptions};
use forebay_lab::assess::prefixes::{PrefixAssessment, PrefixCurve};
use forebay_lab::assess::{self, Figure};
use forebay_store::Outputs;

use super::percent;
use crate::args::AssessArgs;
use crate::failure::{Outcome, usage};
use crate::output::{self, Align};
use crate::{open, outputs, requests, size};

/// Runs the command.
pub fn run(
    args: &AssessArgs,
    log: &Path,
    options: &SessionOptions,
    outputs: &mut Outputs,
) -> Outcome {
    let [model] = args.models.as_slice() else {
        return usage("--kv replays the requests for one model: name one");
    };
    let page = args.output.as_deref().map(|path| outputs::create(outputs, path)).transpose()?;
    if let Some(folder) = &args.svg {
        super::check_folder(folder, outputs)?;
    }
    let inspection = open::inspect(model)?;
    let (_, lines) = requests::read(log)?;
    let defaults = requests::Defaults {
        max_tokens: 1,
        context: options.context,
        special_tokens_in_messages: false,
    };
    let all = requests::prepare(&inspection, model, &lines, &defaults, |_| 0)?;
    let mut prompts = Vec::with_capacity(all.len());
    let mut refused = None;
    for prepared in all {
        match prepared {
            Ok(prepared) => prompts.push(prepared.request.prompt),
            Err(refusal) => _ = refused.get_or_insert(refusal.message),
        }
    }
    let left_out = lines.len() - prompts.len();
    if let Some(why) = refused {
        if prompts.is_empty() {
            return Err(
                anyhow!("{}: no request can be used; the first: {why}", log.display()).into()
            );
        }
        let left_out = output::counted(left_out, "request");
        output::tell!("note: {left_out} left out; the first: {why}");
    }
    let name = super::clean(&open::name(model));
    let bytes = bytes_per_position(inspection.kv_bytes_per_position, options.kv_cache);
    let assessment = PrefixAssessment::new(name.clone(), &prompts, bytes);
    let is_printed = super::write_page(page, || assess::prefix_page(&assessment))?;
    if let Some(folder) = &args.svg {
        let figure: Figure = assess::prefix_figure(&assessment);
        let name = format!("{}-{}.svg", super::file_name(&name), figure.id);
        super::write_figures(folder, &[(name, figure)], outputs)?;
        output::tell!("{}: 1 figure", folder.display());
    }
    match args.json {
        true => output::json(&assessment),
        false if is_printed => Ok(()),
        false => output::print(&text(&assessment)),
    }
}

/// Returns the bytes of keys and values of a position, from those in f16.
fn bytes_per_position(in_f16: u64, of: KvCacheType) -> u64 {
    // 32 numbers have a scale of 2 bytes.
    match of {
        KvCacheType::F16 => in_f16,
        KvCacheType::Q8_0 => in_f16 * 34 / 64,
        KvCacheType::Q4_0 => in_f16 * 18 / 64,
    }
}

fn text(all: &PrefixAssessment) -> String {
    let share = |tokens: u64| percent(tokens as f64 / (all.prompt_tokens as f64).max(1.0));
    let mut head = vec!["size".to_owned(), "positions".to_owned(), "bytes".to_owned()];
    head.extend(all.curves.iter().map(|curve| format!("{} finds", curve.policy)));
    let mut rows = vec![head];
    for (index, point) in all.curves[0].points.iter().enumerate() {
        let mut row =
            vec![percent(point.share), output::grouped(point.positions), size::format(point.bytes)];
        let found = |curve: &PrefixCurve| percent(curve.points[index].found);
        row.extend(all.curves.iter().map(found));
        rows.push(row);
    }
    let table = output::table(&vec![Align::Right; rows[0].len()], &rows);
    let mut text = format!(
        "{}: {} requests with {} prompt tokens, {} different positions of {}\n\n{table}\n",
        all.model,
        output::grouped(all.requests as u64),
        output::grouped(all.prompt_tokens),
        output::grouped(all.distinct_positions),
        size::format(all.bytes_per_position),
    );
    text += &format!(
        "- A cache without a limit finds {} of the prompt tokens.\n",
        share(all.most_found_tokens)
    );
    if let Some(point) = all.enough(0.9).filter(|_| all.most_found_tokens > 0) {
        text += &format!(
            "- {} ({} positions) find nine tenths of that: --kv-ram {}MiB.\n",
            size::format(point.bytes),
            output::grouped(point.positions),
            point.bytes.div_ceil(1 << 20)
        );
    }
    text
}
