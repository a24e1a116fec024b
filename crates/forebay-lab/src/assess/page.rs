//! The report: one HTML file without network access or scripts, for light and dark colour schemes.

use super::assessment::{Assessment, Section};
use super::plot::{self, Figure};
use super::predict::{Prediction, VramCurve};
use super::prefixes::{PrefixAssessment, PrefixCurve};
use crate::page::{Document, bytes, count, escape, percent, sentence, table};

/// Returns the report on assessments, one model after the other. Several models are compared first.
pub fn page(models: &[Assessment]) -> String {
    let names: Vec<&str> = models.iter().map(|model| model.name.as_str()).collect();
    let title = format!("Expert caches for {}", names.join(" and "));
    let document = Document {
        title: &title,
        style: &format!("{}{}", plot::STYLE, include_str!("page.css")),
        head: head(models),
        body: body(models),
        notes: notes(models),
        script: None,
    };
    document.html()
}

/// Returns the report on a prefix cache.
pub fn prefix_page(assessment: &PrefixAssessment) -> String {
    let facts = [
        format!("{} requests", count(assessment.requests as u64)),
        format!("{} prompt tokens", count(assessment.prompt_tokens)),
        format!("{} different positions", count(assessment.distinct_positions)),
        format!("{} each", bytes(assessment.bytes_per_position as f64)),
    ];
    let mut body = figure_grid(&[plot::prefix_figure(assessment)]);
    let points = &assessment.curves[0].points;
    let row = |index: usize| {
        let point = &points[index];
        let mut row = vec![percent(point.share), count(point.positions), bytes(point.bytes as f64)];
        let found = |curve: &PrefixCurve| percent(curve.points[index].found);
        row.extend(assessment.curves.iter().map(found));
        row
    };
    let mut columns = vec!["size", "positions", "bytes"];
    columns.extend(assessment.curves.iter().map(|curve| curve.policy));
    let rows: Vec<Vec<String>> = (0..points.len()).map(row).collect();
    table(&mut body, "Prompt tokens that are found", &columns, 0, &rows);
    let title = format!("A prefix cache for {}", assessment.model);
    Document {
        title: &title,
        style: &format!("{}{}", plot::STYLE, include_str!("page.css")),
        head: heading("How small a prefix cache will do", &assessment.model, &facts),
        body,
        notes: format!("<p>{}</p>", escape(PREFIX_NOTE)),
        script: None,
    }
    .html()
}

/// What the numbers of a prefix cache mean.
const PREFIX_NOTE: &str = "Requests are replayed one after the other, and every prompt is held afterwards as far as it fits. Blocks have 16 \
    positions, and a prompt's last token is always computed. forebay is the policy of the RAM for keys and values, lru evicts what was used longest \
    ago, and belady knows the future. Layers with a window are taken to keep what a hit needs.";

fn head(models: &[Assessment]) -> String {
    let names: Vec<&str> = models.iter().map(|model| model.name.as_str()).collect();
    let title = names.join(" · ");
    let mut facts = Vec::new();
    if let Some(model) = models.first() {
        let locality = &model.mixed.locality;
        facts.push(format!("{} domains", model.domains.len()));
        facts.push(format!("{} tokens of prompts", count(locality.prompt_tokens as u64)));
        facts.push(format!("{} generated", count(locality.generated_tokens as u64)));
        facts.push(format!("seed {}", model.sampling_seed));
    }
    heading("How small an expert cache will do", &title, &facts)
}

/// Returns the title of a report, with a line above it and facts below.
fn heading(kicker: &str, title: &str, facts: &[String]) -> String {
    let facts = facts.iter().map(|fact| format!("<span>{}</span>", escape(fact)));
    format!(
        "<p class=\"kicker\">{kicker}</p><h1>{}</h1><p class=\"facts\">{}</p>",
        escape(title),
        facts.collect::<String>()
    )
}

fn body(models: &[Assessment]) -> String {
    let mut html = String::new();
    if models.len() > 1 {
        table(&mut html, "Side by side", &COMPARED, 1, &compared(models));
        html.push_str(&figure_grid(&plot::comparison(models)));
    }
    for model in models {
        if models.len() > 1 {
            html.push_str(&format!("<h2 class=\"model\">{}</h2>", escape(&model.name)));
        }
        html.push_str(&tiles(model));
        let lines = model.verdict.iter().map(|line| format!("<li>{}</li>", sentence(line)));
        let command = model.command().map_or(String::new(), |(command, why)| {
            format!("<p><code>{}</code><br>{}</p>", escape(&command), sentence(why))
        });
        html.push_str(&format!(
            "<section class=\"verdict\"><h2>What to make of it</h2>{command}<ul>{}</ul></section>",
            lines.collect::<String>()
        ));
        html.push_str(&figure_grid(&plot::figures(model)));
        domain_table(&mut html, model);
        prediction_tables(&mut html, model);
    }
    html
}

fn figure_grid(figures: &[Figure]) -> String {
    let figure = |figure: &Figure| {
        format!(
            "<section><h2>{}</h2>{}<p class=\"caption\">{}</p></section>",
            escape(&figure.title),
            figure.svg,
            sentence(&figure.caption)
        )
    };
    format!("<div class=\"figures\">{}</div>", figures.iter().map(figure).collect::<String>())
}

/// Head of the table that compares models.
const COMPARED: [&str; 9] = [
    "model",
    "experts",
    "misses at 25 %",
    "at 50 %",
    "at 75 %",
    "75 % hit with",
    "in 64 tokens",
    "kept from token to token",
    "one token uses",
];

fn compared(models: &[Assessment]) -> Vec<Vec<String>> {
    let row = |(index, model): (usize, &Assessment)| {
        let at = |share| miss_at(&model.mixed, share);
        let window =
            model.mixed.locality.windows.get(1).and_then(|window| window.experts_per_layer);
        vec![
            // Colour of the model in the chart below.
            format!(
                "<span class=\"swatch {}\"></span>{}",
                SWATCHES[index % 8],
                escape(&model.name)
            ),
            format!("{} of {}", model.experts_per_token, model.experts),
            at(0.25),
            at(0.5),
            at(0.75),
            plot::needed(model),
            window.map_or("–".to_owned(), |experts| format!("{experts:.1} experts")),
            percent(model.mixed.locality.token_overlap),
            bytes(model.cycle_bytes as f64),
        ]
    };
    models.iter().enumerate().map(row).collect()
}

/// Classes of the shared style that have the colours of the charts.
const SWATCHES: [&str; 8] = [
    "plain",
    "c-experts",
    "c-embedding",
    "w-demand",
    "c-router",
    "c-feed-forward",
    "c-head",
    "c-vectors",
];

fn miss_at(section: &Section, share: f64) -> String {
    let point = section.curves.first().and_then(|curve| curve.at(share));
    let Some(point) = point else { return "–".to_owned() };
    let misses = percent(1.0 - point.hit_rate);
    match point.hit_rate_interval {
        Some([low, high]) => format!("{misses} ± {:.1}", 50.0 * (high - low)),
        None => misses,
    }
}

fn tiles(model: &Assessment) -> String {
    let locality = &model.mixed.locality;
    let quarter = model.mixed.curves.first().and_then(|curve| curve.at(0.25));
    let steady = quarter.and_then(|point| point.faulted_experts_per_token.steady);
    let uses = model.experts_per_token * model.expert_layers;
    let mut tiles = vec![
        (
            "experts",
            bytes(model.expert_bytes as f64),
            format!(
                "{} layers of {}, {} per token",
                model.expert_layers, model.experts, model.experts_per_token
            ),
        ),
        ("75 % of accesses hit with", plot::needed(model), model.residency.policy.clone()),
        (
            "misses at a quarter",
            miss_at(&model.mixed, 0.25),
            steady
                .map_or(String::new(), |steady| format!("{steady:.1} of {uses} experts per token")),
        ),
        (
            "kept from token to token",
            percent(locality.token_overlap),
            "of a layer's experts".to_owned(),
        ),
    ];
    if let Some(window) = locality.windows.get(1)
        && let Some(experts) = window.experts_per_layer
    {
        tiles.push((
            "experts in 64 tokens",
            format!("{experts:.1}"),
            format!("per layer, {}", percent(window.share.unwrap_or(0.0))),
        ));
    }
    let tile = |(name, figure, more): &(&str, String, String)| {
        format!(
            "<div class=\"tile\"><h3>{}</h3><b>{}</b><small>{}</small></div>",
            escape(name),
            escape(figure),
            escape(more)
        )
    };
    format!("<div class=\"tiles\">{}</div>", tiles.iter().map(tile).collect::<String>())
}

fn domain_table(html: &mut String, model: &Assessment) {
    let row = |section: &Section| {
        let locality = &section.locality;
        let window = |index: usize| {
            let found = locality.windows.get(index).and_then(|window| window.experts_per_layer);
            found.map_or("–".to_owned(), |experts| format!("{experts:.1}"))
        };
        vec![
            escape(&section.name),
            count((locality.prompt_tokens + locality.generated_tokens) as u64),
            miss_at(section, 0.25),
            miss_at(section, 0.5),
            miss_at(section, 0.75),
            window(0),
            window(1),
            window(2),
            percent(locality.token_overlap),
            percent(locality.usage_entropy_share),
        ]
    };
    let rows: Vec<Vec<String>> =
        std::iter::once(&model.mixed).chain(&model.domains).map(row).collect();
    let head = [
        "domain",
        "tokens",
        "misses at 25 %",
        "at 50 %",
        "at 75 %",
        "experts in 16",
        "in 64",
        "in 256 tokens",
        "kept",
        "entropy",
    ];
    table(html, "Domains", &head, 1, &rows);
}

fn prediction_tables(html: &mut String, model: &Assessment) {
    let Some(predictions) = &model.predictions else { return };
    let row = |p: &Prediction| {
        vec![
            bytes(p.ram_bytes as f64),
            // A phone shows these columns without scrolling.
            rate(p),
            percent(p.hit_rate),
            bytes(p.read_bytes_per_token),
            percent(p.kept_share),
            escape(&p.limit.to_string()),
        ]
    };
    let rows: Vec<Vec<String>> = predictions.by_ram.iter().map(row).collect();
    let head = ["RAM", "tokens/s", "hits", "read per token", "experts kept", "most time goes to"];
    table(html, "Tokens/s to expect on the CPU, by RAM", &head, 1, &rows);
    let Some((first, others)) = predictions.by_vram.split_first() else { return };
    let of_ram = |curve: &VramCurve| format!("{} of RAM", bytes(curve.ram_bytes as f64));
    let mut head = vec!["VRAM".to_owned()];
    head.extend(predictions.by_vram.iter().map(of_ram));
    head.extend(["hits in VRAM", "experts in VRAM", "most time goes to"].map(str::to_owned));
    let head: Vec<&str> = head.iter().map(String::as_str).collect();
    let row = |p: &Prediction| {
        let same = |curve: &VramCurve| {
            let found = curve.points.iter().find(|other| other.vram_bytes == p.vram_bytes);
            found.map_or("–".to_owned(), rate)
        };
        let mut row = vec![bytes(p.budget_bytes() as f64), rate(p)];
        row.extend(others.iter().map(same));
        let limit = escape(&p.limit.to_string());
        row.extend([percent(p.hit_rate), percent(p.kept_share), limit]);
        row
    };
    let rows: Vec<Vec<String>> = first.points.iter().map(row).collect();
    table(html, "Tokens/s to expect on the GPU, by VRAM and RAM", &head, 1, &rows);
}

fn rate(prediction: &Prediction) -> String {
    format!("{:.1}", prediction.tokens_per_second)
}

fn notes(models: &[Assessment]) -> String {
    let mut notes = vec![
        "± is half the width of the interval that holds 95 % of the results with other prompts: as many are drawn from these \
         prompts, with replacement, a thousand times."
            .to_owned(),
        "An access is one distinct expert of a layer's batch, as the engine counts: prompts go through the cache in \
         batches and warm it, misses are counted on generated tokens. Capacities are shares of the experts' bytes."
            .to_owned(),
        "In 16, 64, 256 tokens: distinct experts per layer in windows of that many consecutive tokens. Kept: experts of \
         a token that the token before used in the same layer. Entropy: of usage, as a share of even use."
            .to_owned(),
    ];
    for model in models {
        let about = model.about_predictions();
        notes.extend(about.iter().map(|about| format!("{}: {about}", model.name)));
        notes.push(format!("{}: {}", model.name, model.about_prompts()));
        if let Some(measured) = model.about_measured() {
            notes.push(format!("{}: {measured}", model.name));
        }
        if model.prompt_tokens_cut > 0 {
            notes.push(format!(
                "{}: {} tokens of prompts did not fit the context and were left out.",
                model.name,
                count(model.prompt_tokens_cut as u64)
            ));
        }
    }
    notes.iter().map(|note| format!("<p>{}</p>", sentence(note))).collect()
}
