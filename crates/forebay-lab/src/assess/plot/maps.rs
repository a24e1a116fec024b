//! Maps of many cells: usage by layer and expert, and residency over time.

use std::fmt::Write as _;

use super::svg::{Anchor, LEFT, RIGHT, Svg, step};
use crate::assess::{Locality, ResidencyOverTime};

/// Usage, as a multiple of even use, that gets the strongest colour.
const STRONGEST: f64 = 4.0;
/// Number of shades. Each shade is one path, which keeps the file small.
const SHADES: usize = 12;
/// Number of tokens that the line of misses is averaged over.
const SMOOTH: usize = 8;

/// Draws usage with layers down and experts across. A stronger colour means more uses.
pub(super) fn usage(label: &str, locality: &Locality) -> String {
    let mut svg = Svg::new();
    let layers: Vec<(usize, &Vec<u64>)> =
        locality.usage.iter().enumerate().filter(|(_, uses)| !uses.is_empty()).collect();
    let experts = layers.iter().map(|(_, uses)| uses.len()).max().unwrap_or(1);
    let width = (RIGHT - LEFT) / experts as f64;
    let height = (220.0 / layers.len().max(1) as f64).clamp(3.0, 24.0);
    let marks = [(0.25, "a quarter of even use"), (1.0, "even use"), (STRONGEST, "four times")];
    let entry = |&(much, name): &(f64, &str)| (name.to_owned(), format!("heat h{}", shade(much)));
    let top = svg.legend(&marks.iter().map(entry).collect::<Vec<_>>());
    let gap = if width > 5.0 && height > 5.0 { 1.0 } else { 0.0 };
    let mut shades = vec![String::new(); SHADES];
    for (row, (_, uses)) in layers.iter().enumerate() {
        let even = uses.iter().sum::<u64>() as f64 / uses.len() as f64;
        for (expert, &count) in uses.iter().enumerate().filter(|(_, count)| **count > 0) {
            let (x, y) = (LEFT + width * expert as f64, top + height * row as f64);
            let (w, h) = (width - gap, height - gap);
            let cells = &mut shades[shade(count as f64 / even)];
            let _ = write!(cells, "M{x:.1} {y:.1}h{w:.2}v{h:.2}h-{w:.2}z");
        }
    }
    for (shade, path) in shades.iter().enumerate().filter(|(_, path)| !path.is_empty()) {
        svg.path(&format!("heat h{shade}"), path);
    }
    let bottom = top + height * layers.len() as f64;
    let every = step(layers.len() as f64, (bottom - top) / 16.0).max(1.0) as usize;
    for (row, (layer, _)) in layers.iter().enumerate().step_by(every) {
        let y = top + height * (row as f64 + 0.5) + 3.5;
        svg.text(LEFT - 6.0, y, Anchor::End, &layer.to_string());
    }
    let every = step(experts as f64, 8.0).max(1.0) as usize;
    for expert in (0..experts).step_by(every) {
        let x = LEFT + width * (expert as f64 + 0.5);
        svg.text(x, bottom + 13.0, Anchor::Middle, &expert.to_string());
    }
    svg.text(LEFT - 6.0, 12.0, Anchor::End, "layer");
    svg.text((LEFT + RIGHT) / 2.0, bottom + 28.0, Anchor::Middle, "expert");
    svg.reach(bottom + 34.0);
    svg.finish(label)
}

/// Returns the shade for a multiple of even use.
fn shade(times: f64) -> usize {
    let much = (times / STRONGEST).min(1.0).sqrt();
    ((much * SHADES as f64) as usize).min(SHADES - 1)
}

/// Draws the misses of each generated token and the domain that it belongs to.
pub(super) fn misses(label: &str, over_time: &ResidencyOverTime, domains: &[&str]) -> String {
    let mut svg = Svg::new();
    let colour = |domain: &str| domains.iter().position(|name| *name == domain).unwrap_or(0) + 1;
    let entry = |name: &&str| (name.to_string(), format!("fill s{}", colour(name)));
    let top = svg.legend(&domains.iter().map(entry).collect::<Vec<_>>()) + 6.0;
    let bottom = top + 170.0;
    let tokens = over_time.misses_per_token.len().max(1);
    let smooth = |index: usize| {
        let from = (index + 1).saturating_sub(SMOOTH);
        let part = &over_time.misses_per_token[from..=index];
        part.iter().sum::<u32>() as f64 / part.len() as f64
    };
    let means: Vec<f64> = (0..over_time.misses_per_token.len()).map(smooth).collect();
    let most = means.iter().copied().fold(1.0, f64::max);
    let by = step(most, 4.0);
    let most = (most / by).ceil() * by;
    let x = |token: usize| LEFT + (RIGHT - LEFT) * token as f64 / tokens as f64;
    let y = |value: f64| bottom - (bottom - top) * value / most;
    let mut value = 0.0;
    while value <= most * 1.0001 {
        svg.line("grid", (LEFT, y(value)), (RIGHT, y(value)));
        svg.text(LEFT - 6.0, y(value) + 3.5, Anchor::End, &format!("{value:.0}"));
        value += by;
    }
    let mut from = 0;
    for stretch in &over_time.stretches {
        let class = format!("fill s{}", colour(&stretch.domain));
        let end = from + stretch.generated_tokens;
        let width = x(end) - x(from);
        let tip = format!("{}: tokens {from} to {end}", stretch.domain);
        svg.rect(&class, [x(from), top, width, bottom - top], 0.14, &tip);
        svg.rect(&class, [x(from), bottom + 2.0, width, 5.0], 1.0, &tip);
        from = end;
    }
    let points: Vec<(f64, f64)> =
        means.iter().enumerate().map(|(token, &mean)| (x(token), y(mean))).collect();
    svg.polyline("line s0 thin", &points);
    token_axis(&mut svg, tokens, bottom + 20.0, 0);
    svg.finish(label)
}

fn token_axis(svg: &mut Svg, tokens: usize, y: f64, first: usize) {
    let every = step(tokens as f64, 6.0).max(1.0) as usize;
    for token in (first.next_multiple_of(every)..=first + tokens).step_by(every) {
        let x = LEFT + (RIGHT - LEFT) * (token - first) as f64 / tokens as f64;
        let anchor = if x > RIGHT - 14.0 { Anchor::End } else { Anchor::Middle };
        svg.text(x, y, anchor, &token.to_string());
    }
    svg.text((LEFT + RIGHT) / 2.0, y + 15.0, Anchor::Middle, "generated tokens");
    svg.reach(y + 21.0);
}

/// Draws one layer with experts down and tokens across. Cells show which experts are resident, used
/// and missed.
pub(super) fn residency(label: &str, over_time: &ResidencyOverTime) -> String {
    let mut svg = Svg::new();
    let states = [(b'r', "resident"), (b'h', "used, was there"), (b'm', "used, was missed")];
    let entry = |&(letter, name): &(u8, &str)| {
        (name.to_owned(), format!("fill cell-{}", char::from(letter)))
    };
    let top = svg.legend(&states.iter().map(entry).collect::<Vec<_>>()) + 4.0;
    let columns: Vec<&[u8]> = over_time.map.iter().map(|column| column.as_bytes()).collect();
    let experts = columns.first().map_or(1, |column| column.len());
    let tokens = columns.len().max(1);
    let width = (RIGHT - LEFT) / tokens as f64;
    let height = (230.0 / experts as f64).clamp(1.5, 9.0);
    for (letter, _) in states {
        let mut path = String::new();
        for expert in 0..experts {
            let mut token = 0;
            while token < columns.len() {
                let is = |token: usize| columns[token].get(expert) == Some(&letter);
                let start = token;
                while token < columns.len() && is(token) {
                    token += 1;
                }
                if token > start {
                    let (x, y) = (LEFT + width * start as f64, top + height * expert as f64);
                    let (w, h) = (width * (token - start) as f64, height * 0.9);
                    let _ = write!(path, "M{x:.1} {y:.1}h{w:.2}v{h:.2}h-{w:.2}z");
                }
                token += 1;
            }
        }
        svg.path(&format!("fill cell-{}", char::from(letter)), &path);
    }
    let bottom = top + height * experts as f64;
    let every = step(experts as f64, 6.0).max(1.0) as usize;
    for expert in (0..experts).step_by(every) {
        let y = top + height * (expert as f64 + 0.5) + 3.5;
        svg.text(LEFT - 6.0, y, Anchor::End, &expert.to_string());
    }
    token_axis(&mut svg, tokens, bottom + 15.0, over_time.map_start);
    svg.finish(label)
}
