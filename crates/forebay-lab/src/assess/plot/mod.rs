//! The figures of an assessment as SVG, for the report and for separate files.

mod lines;
mod maps;
mod svg;

use super::assessment::{Assessment, GOOD_HIT_RATE, Section};
use super::predict::Prediction;
use super::prefixes::{PrefixAssessment, PrefixCurve};
use super::sweep::PolicyCurve;
use crate::page::{bytes, count, escape, percent};
use lines::{Axis, Mark, Series};

/// Colours for light and dark schemes. The report includes them in its style.
pub(super) const STYLE: &str = include_str!("plot.css");
const COLOURS: usize = 8;

/// One figure.
#[derive(Clone, Debug)]
pub struct Figure {
    /// Identifier for file names: letters and dashes.
    pub id: &'static str,
    pub title: String,
    /// Explanation of the figure.
    pub caption: String,
    /// SVG element that takes its colours from the page.
    pub svg: String,
}

impl Figure {
    /// Returns the figure as a complete SVG file for light and dark schemes, with its title and caption.
    pub fn standalone(&self) -> String {
        /// Room for the title above the drawing, which begins at 0.
        const HEAD: f64 = 30.0;
        // The part of the page's style that defines the colours.
        let variables = crate::page::STYLE.split("* {").next().unwrap_or_default();
        let style =
            format!("<style>{variables}\nsvg {{ background: var(--card); }}\n{STYLE}</style>");
        let (open, rest) = self.svg.split_once('>').unwrap_or((&self.svg, ""));
        let (before, view) = open.split_once("viewBox=\"0 0 ").unwrap_or((open, ""));
        let (size, after) = view.split_once('"').unwrap_or(("", ""));
        let (width, height) = size.split_once(' ').unwrap_or(("0", "0"));
        let height = height.parse().unwrap_or(0.0) + HEAD;
        let open = before.replace("<svg ", "<svg width=\"880\" ");
        let title = escape(&self.title);
        format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n{open}viewBox=\"0 -{HEAD} {width} {height}\"{after}>\
             <title>{title}</title><desc>{}</desc>{style}<text class=\"title\" x=\"10\" y=\"-11\">{title}</text>{rest}\n",
            escape(&self.caption)
        )
    }
}

/// Returns all figures of one model.
pub fn figures(assessment: &Assessment) -> Vec<Figure> {
    let mut all = vec![
        by_policy(assessment),
        by_domain(assessment),
        growth(assessment),
        usage(assessment),
        misses(assessment),
        residency(assessment),
        reuse(assessment),
    ];
    all.extend(speeds(assessment));
    all
}

/// Returns the figures that compare models.
pub fn comparison(models: &[Assessment]) -> Vec<Figure> {
    let mixed: Vec<(String, &Section)> =
        models.iter().map(|model| (model.name.clone(), &model.mixed)).collect();
    let growth = Figure {
        id: "comparison-growth",
        title: "Growth of the working sets".to_owned(),
        caption: "Experts used at least once so far, as a share of all; all domains in turns."
            .to_owned(),
        svg: growth_chart(&mixed, false),
    };
    vec![compared_misses(models), growth]
}

/// Returns what caches of all sizes find.
pub fn prefix_figure(assessment: &PrefixAssessment) -> Figure {
    let line = |(index, curve): (usize, &PrefixCurve)| {
        let points = curve.points.iter().map(|point| {
            let tip = format!(
                "{}: {} of the prompts with {} ({} positions)",
                curve.policy,
                percent(point.found),
                bytes(point.bytes as f64),
                count(point.positions)
            );
            (100.0 * point.share, 100.0 * (1.0 - point.found), tip)
        });
        Series {
            name: curve.policy.to_owned(),
            colour: index % COLOURS,
            style: match () {
                () if curve.is_bound => "dashed",
                () if index == 0 => "thick",
                () => "",
            },
            points: points.collect(),
        }
    };
    let series: Vec<Series> = assessment.curves.iter().enumerate().map(line).collect();
    let all = assessment.distinct_positions as f64 * assessment.bytes_per_position as f64;
    let text = |value: f64| format!("{value:.0} %");
    let in_bytes = |value: f64| bytes(value / 100.0 * all);
    let axis =
        |name| Axis { least: 0.0, most: 100.0, is_binary: false, ticks: 5.0, text: &text, name };
    let found = assessment.most_found_tokens as f64 / (assessment.prompt_tokens as f64).max(1.0);
    let mark = assessment.enough(0.9).map(|point| Mark {
        x: 100.0 * point.share,
        name: format!("nine tenths: {}", bytes(point.bytes as f64)),
    });
    Figure {
        id: "prefixes",
        title: "Prompt tokens that must be computed".to_owned(),
        caption: format!(
            "{} requests with {} prompt tokens, one after the other. A cache without a limit finds {}. Dashed: a bound that knows the \
             future. The dotted line is the size that finds nine tenths of what can be found.",
            count(assessment.requests as u64),
            count(assessment.prompt_tokens),
            percent(found)
        ),
        svg: lines::chart(
            "Share of the prompt tokens that a prefix cache does not have, by its size",
            &axis("of all different positions in the cache"),
            &axis(""),
            &series,
            mark.as_ref(),
            Some(&in_bytes),
        ),
    }
}

fn compared_misses(models: &[Assessment]) -> Figure {
    let one = |(index, model): (usize, &Assessment)| {
        let curve = model.mixed.curves.first()?;
        Some(series(curve, model.name.clone(), index, ""))
    };
    let series: Vec<Series> = models.iter().enumerate().filter_map(one).collect();
    let policy = models.iter().find_map(|m| m.mixed.curves.first()).map_or("", |c| &c.policy);
    Figure {
        id: "comparison",
        title: "Misses by share of the experts in memory".to_owned(),
        caption: format!(
            "All domains in turns, policy {policy}, generated tokens. Lower is better: the same share of a model kept \
             in memory costs fewer reads."
        ),
        svg: miss_chart(
            "Misses of all models by share of the experts in memory",
            &series,
            None,
            None,
        ),
    }
}

fn series(curve: &PolicyCurve, name: String, colour: usize, style: &'static str) -> Series {
    let point = |point: &super::CurvePoint| {
        let tip = format!(
            "{name}: {} misses with {} ({} of the experts)",
            percent(1.0 - point.hit_rate),
            bytes(point.capacity_bytes as f64),
            percent(point.share)
        );
        (100.0 * point.share, 100.0 * (1.0 - point.hit_rate), tip)
    };
    let points = curve.points.iter().map(point).collect();
    Series { name: name.clone(), colour: colour % COLOURS, style, points }
}

fn miss_chart(
    label: &str,
    series: &[Series],
    mark: Option<&Mark>,
    expert_bytes: Option<u64>,
) -> String {
    let text = |value: f64| format!("{value:.0} %");
    let in_bytes = |value: f64| bytes(value / 100.0 * expert_bytes.unwrap_or(0) as f64);
    let second: Option<&dyn Fn(f64) -> String> = expert_bytes.map(|_| &in_bytes as _);
    let x_axis = Axis {
        least: 0.0,
        most: 100.0,
        is_binary: false,
        ticks: 5.0,
        text: &text,
        name: "experts in memory",
    };
    let y_axis =
        Axis { least: 0.0, most: 100.0, is_binary: false, ticks: 5.0, text: &text, name: "" };
    lines::chart(label, &x_axis, &y_axis, series, mark, second)
}

fn by_policy(assessment: &Assessment) -> Figure {
    let line = |(index, curve): (usize, &PolicyCurve)| {
        let style = match () {
            () if curve.is_bound => "dashed",
            () if index == 0 => "thick",
            () => "",
        };
        series(curve, curve.policy.clone(), index, style)
    };
    let series: Vec<Series> = assessment.mixed.curves.iter().enumerate().map(line).collect();
    let mark = Mark {
        x: 100.0 * assessment.cycle_bytes as f64 / assessment.expert_bytes.max(1) as f64,
        name: format!("one token: {}", bytes(assessment.cycle_bytes as f64)),
    };
    Figure {
        id: "misses-by-policy",
        title: "Misses by policy".to_owned(),
        caption: "All domains in turns, generated tokens. Left of the dotted line a global LRU list is smaller than \
                  what one token uses, and never hits. Dashed: bounds that know the future or the whole recording."
            .to_owned(),
        svg: miss_chart(
            "Miss ratio by capacity and policy",
            &series,
            Some(&mark),
            Some(assessment.expert_bytes),
        ),
    }
}

fn by_domain(assessment: &Assessment) -> Figure {
    let line = |(index, section): (usize, &Section)| {
        let style = if index == 0 { "thick" } else { "" };
        Some(series(section.curves.first()?, section.name.clone(), index, style))
    };
    let sections = std::iter::once(&assessment.mixed).chain(&assessment.domains);
    let series: Vec<Series> = sections.enumerate().filter_map(line).collect();
    Figure {
        id: "misses-by-domain",
        title: "Misses by domain".to_owned(),
        caption: format!(
            "Each domain by itself, and all in turns (mixed), policy {}.",
            assessment.residency.policy
        ),
        svg: miss_chart(
            "Miss ratio by capacity and domain",
            &series,
            None,
            Some(assessment.expert_bytes),
        ),
    }
}

fn growth(assessment: &Assessment) -> Figure {
    let sections: Vec<(String, &Section)> = std::iter::once(&assessment.mixed)
        .chain(&assessment.domains)
        .map(|section| (section.name.clone(), section))
        .collect();
    let windows = assessment.mixed.locality.windows.iter().filter_map(|window| {
        let found = window.experts_per_layer?;
        Some(format!("{found:.1} in {} tokens", window.tokens))
    });
    Figure {
        id: "working-set",
        title: "Growth of the working set".to_owned(),
        caption: format!(
            "Experts used at least once so far, prompts included. Distinct experts per layer, of {}: {}.",
            assessment.experts,
            windows.collect::<Vec<_>>().join(", ")
        ),
        svg: growth_chart(&sections, true),
    }
}

/// Draws growth curves. The token axis is logarithmic because most growth is over after a few hundred tokens.
fn growth_chart(sections: &[(String, &Section)], first_is_thick: bool) -> String {
    let line = |(index, (name, section)): (usize, &(String, &Section))| {
        let point = |&(tokens, share): &(usize, f64)| {
            ((tokens.max(1) as f64).log2(), 100.0 * share, String::new())
        };
        Series {
            name: name.clone(),
            colour: index % COLOURS,
            style: if index == 0 && first_is_thick { "thick" } else { "" },
            points: section.locality.growth.iter().map(point).collect(),
        }
    };
    let series: Vec<Series> = sections.iter().enumerate().map(line).collect();
    let ends = sections.iter().filter_map(|(_, section)| section.locality.growth.last());
    let most = (ends.map(|end| end.0).max().unwrap_or(2).max(2) as f64).log2();
    let count = |value: f64| crate::page::count(value.exp2().round() as u64);
    let share = |value: f64| format!("{value:.0} %");
    lines::chart(
        "Share of the experts that were used, by number of tokens",
        &Axis { least: 0.0, most, is_binary: false, ticks: 7.0, text: &count, name: "tokens" },
        &Axis { least: 0.0, most: 100.0, is_binary: false, ticks: 5.0, text: &share, name: "" },
        &series,
        None,
        None,
    )
}

fn usage(assessment: &Assessment) -> Figure {
    Figure {
        id: "usage",
        title: "Usage of the experts".to_owned(),
        caption: format!(
            "The strongest cells are used four times as often as even use would be, or more. Usage has {} of the entropy \
             of even use.",
            percent(assessment.mixed.locality.usage_entropy_share)
        ),
        svg: maps::usage(
            "How often each expert of each layer was used",
            &assessment.mixed.locality,
        ),
    }
}

fn misses(assessment: &Assessment) -> Figure {
    let over_time = &assessment.residency;
    let mut domains: Vec<&str> = Vec::new();
    for section in &assessment.domains {
        domains.push(&section.name);
    }
    Figure {
        id: "misses-over-time",
        title: "Misses over time".to_owned(),
        caption: format!(
            "Experts missed per generated token, mean of 8, with {} of {} experts kept per layer ({}). The background \
             is the domain of the text.",
            over_time.kept_per_layer, assessment.experts, over_time.policy
        ),
        svg: maps::misses("Experts missed per token over time, by domain", over_time, &domains),
    }
}

fn residency(assessment: &Assessment) -> Figure {
    let over_time = &assessment.residency;
    Figure {
        id: "residency",
        title: format!("Residency in layer {}", over_time.layer),
        caption: format!(
            "Each row is an expert; {} of {} are kept ({}). The layer with the median of misses, from the middle of the \
             recording; what prompts change happens between two columns.",
            over_time.kept_per_layer, assessment.experts, over_time.policy
        ),
        svg: maps::residency("Which experts of one layer are resident, used and missed", over_time),
    }
}

fn reuse(assessment: &Assessment) -> Figure {
    let locality = &assessment.mixed.locality;
    let total = locality.first_uses + locality.reuse.iter().map(|class| class.uses).sum::<u64>();
    let share = |uses: u64| uses as f64 / total.max(1) as f64;
    let bar = |class: &super::ReuseClass| {
        let name = match class.from {
            from if from < 1024 => from.to_string(),
            from => format!("{}k", from / 1024),
        };
        let tip = match class.from == class.to {
            true => format!("the token before used it: {}", percent(share(class.uses))),
            false => {
                format!(
                    "{} to {} tokens before: {}",
                    class.from,
                    class.to,
                    percent(share(class.uses))
                )
            }
        };
        (name, share(class.uses), tip)
    };
    let mut bars: Vec<(String, f64, String)> = locality.reuse.iter().map(bar).collect();
    let first = share(locality.first_uses);
    bars.push(("first".to_owned(), first, format!("not used before: {}", percent(first))));
    Figure {
        id: "reuse",
        title: "Reuse distances".to_owned(),
        caption: "How many tokens ago an expert was used last, as a share of all uses; each bar up to the next one's \
                  number, the last one first uses. Far to the right means that only a large cache finds it again."
            .to_owned(),
        svg: lines::bars("Uses of experts by tokens since their last use", "tokens since the last use", &bars),
    }
}

/// Returns the figures of speed by RAM on the CPU and by VRAM on a GPU.
fn speeds(assessment: &Assessment) -> Vec<Figure> {
    let Some(predictions) = &assessment.predictions else { return Vec::new() };
    let policy = &assessment.residency.policy;
    let by_ram = speed_series(format!("CPU, {policy}"), 1, &predictions.by_ram);
    let by_vram = predictions.by_vram.iter().enumerate().map(|(index, curve)| {
        let name = format!("{} of RAM", bytes(curve.ram_bytes as f64));
        speed_series(name, index, &curve.points)
    });
    let mut figures = vec![Figure {
        id: "speed",
        title: "Tokens/s to expect on the CPU, by RAM".to_owned(),
        caption: format!(
            "A prediction for the CPU of {}, by its machine profile and the hits of this recording under {policy}.",
            predictions.machine
        ),
        svg: speed_chart("Predicted tokens per second by RAM", "RAM for weights", &[by_ram]),
    }];
    if let (Some(gpu), false) = (&predictions.gpu, predictions.by_vram.is_empty()) {
        let series: Vec<Series> = by_vram.collect();
        figures.push(Figure {
            id: "speed-gpu",
            title: "Tokens/s to expect on the GPU, by VRAM".to_owned(),
            caption: format!(
                "A prediction for the GPU of {} ({gpu}), likewise: one line for each amount of RAM for the experts that \
                 VRAM has no room for.",
                predictions.machine
            ),
            svg: speed_chart("Predicted tokens per second by VRAM", "VRAM for everything", &series),
        });
    }
    figures
}

fn speed_series(name: String, colour: usize, points: &[Prediction]) -> Series {
    let point = |p: &Prediction| {
        let place = if p.vram_bytes.is_some() { "VRAM" } else { "RAM" };
        let tip = format!(
            "{name}: {:.1} tokens/s with {} of {place}; {} hits there, {} from the disk per token, most of the time {}",
            p.tokens_per_second,
            bytes(p.budget_bytes() as f64),
            percent(p.hit_rate),
            bytes(p.read_bytes_per_token),
            p.limit
        );
        (p.budget_bytes() as f64, p.tokens_per_second, tip)
    };
    let points = points.iter().map(point).collect();
    Series { name: name.clone(), colour, style: "thick", points }
}

fn speed_chart(label: &str, budget: &str, series: &[Series]) -> String {
    let points = || series.iter().flat_map(|series| &series.points);
    let bytes_max = points().map(|point| point.0).fold(0.0, f64::max);
    let most = points().map(|point| point.1).fold(0.0, f64::max);
    let size = |value: f64| bytes(value);
    let count = |value: f64| format!("{value:.0}");
    // The driver's own part of VRAM may be most of it, so the axis may begin above zero.
    let bytes_min = points().map(|point| point.0).fold(f64::INFINITY, f64::min);
    let least = if bytes_min > bytes_max / 2.0 { bytes_min } else { 0.0 };
    let (ticks, text) = (4.0, &size);
    let x_axis = Axis { least, most: bytes_max, is_binary: true, ticks, text, name: budget };
    let y_axis = Axis {
        least: 0.0,
        most: most * 1.05,
        is_binary: false,
        ticks: 6.0,
        text: &count,
        name: "",
    };
    lines::chart(label, &x_axis, &y_axis, series, None, None)
}

/// Returns the memory that a good hit rate takes, for tables.
pub(super) fn needed(assessment: &Assessment) -> String {
    let curve = assessment.mixed.curves.first();
    match curve.and_then(|curve| curve.reaches(GOOD_HIT_RATE)) {
        Some(point) => bytes(point.capacity_bytes as f64),
        None => "not reached".to_owned(),
    }
}
