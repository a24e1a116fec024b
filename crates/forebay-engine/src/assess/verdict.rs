//! The answer in sentences that a person can act on.

use super::sweep::PolicyCurve;
use super::{Assessment, COMFORTABLE_HIT_RATE, GOOD_HIT_RATE, Prediction, Section};
use crate::page::{bytes, percent};

/// The share of the experts at which models are compared.
const QUARTER: f64 = 0.25;
/// Domains whose hit rates differ by less are not told apart.
const POINTS_WORTH_TELLING: f64 = 0.03;

/// What to make of an assessment.
pub fn words(assessment: &Assessment) -> Vec<String> {
    let mixed = &assessment.mixed;
    let Some(engine) = mixed.curves.first() else { return Vec::new() };
    let mut said = vec![judgement(assessment, engine), capacities(assessment, engine)];
    said.extend(cliff(assessment, engine));
    said.extend(policies(mixed, engine));
    said.extend(domains(assessment, engine));
    said.push(needs(assessment.memory_bytes, assessment.weights_bytes, &assessment.predictions));
    said
}

fn judgement(assessment: &Assessment, engine: &PolicyCurve) -> String {
    let misses = engine.at(QUARTER).map_or(1.0, |point| 1.0 - point.hit_rate);
    let overlap = percent(assessment.mixed.locality.token_overlap);
    let k = assessment.experts_per_token;
    let word = match misses {
        m if m <= 0.10 => "very good locality",
        m if m <= 0.25 => "good locality",
        m if m <= 0.45 => "moderate locality",
        _ => "poor locality",
    };
    let first = format!(
        "{word}: with a quarter of the experts in memory {} of accesses miss; a token shares {overlap} of its {k} experts \
         per layer with the token before it",
        percent(misses)
    );
    match misses {
        m if m <= 0.25 => format!("{first}. It runs well from a cache much smaller than itself."),
        m if m <= 0.45 => format!(
            "{first}. A small cache helps, but most of the speed comes with half of it or more."
        ),
        _ if assessment.weights_bytes <= assessment.memory_bytes => format!(
            "{first}. Its routing jumps about: no small cache will do, and each further share of it in memory counts; \
             keep all of it there, which this machine can."
        ),
        _ => format!(
            "{first}. Its routing jumps about: no small cache will do, and each further share of it in memory counts. \
             Prefer a smaller quantisation, or a model whose experts come back sooner."
        ),
    }
}

fn capacities(assessment: &Assessment, engine: &PolicyCurve) -> String {
    let at = |wanted| match engine.reaches(wanted) {
        Some(point) => format!(
            "{} of accesses hit with {} ({} of the experts)",
            percent(wanted),
            bytes(point.capacity_bytes as f64),
            percent(point.share)
        ),
        None => format!("{} of hits is not reached: first uses alone miss more", percent(wanted)),
    };
    format!(
        "{}; {}. All experts are {}; dense weights come on top.",
        at(GOOD_HIT_RATE),
        at(COMFORTABLE_HIT_RATE),
        bytes(assessment.expert_bytes as f64)
    )
}

fn cliff(assessment: &Assessment, engine: &PolicyCurve) -> Option<String> {
    let cycle = assessment.cycle_bytes as f64;
    let share = cycle / assessment.expert_bytes.max(1) as f64;
    let lru = assessment.mixed.curve("lru")?;
    // The largest capacity of the curve that lies below one token's cycle.
    let below = lru.points.iter().rposition(|point| (point.capacity_bytes as f64) < cycle)?;
    let (global, layered) = (lru.points.get(below)?, engine.points.get(below)?);
    Some(format!(
        "The cliff: one token's experts in all layers are {} ({} of all). A global LRU list below that has forgotten \
         every expert before it comes back: at {} it hits {} where {} hits {}.",
        bytes(cycle),
        percent(share),
        bytes(global.capacity_bytes as f64),
        percent(global.hit_rate),
        engine.policy,
        percent(layered.hit_rate)
    ))
}

fn policies(mixed: &Section, engine: &PolicyCurve) -> Option<String> {
    let rate = |curve: &PolicyCurve| curve.at(QUARTER).map_or(0.0, |point| point.hit_rate);
    let online = mixed.curves.iter().filter(|curve| !curve.is_bound);
    let best = online.max_by(|a, b| rate(a).total_cmp(&rate(b)))?;
    let bound = mixed.curves.iter().filter(|curve| curve.is_bound);
    let bound = bound.max_by(|a, b| rate(a).total_cmp(&rate(b)));
    let mut said = format!(
        "At a quarter of the experts the best policy is {} with {} of hits",
        best.policy,
        percent(rate(best))
    );
    if best.policy != engine.policy {
        said.push_str(&format!(" ({}: {})", engine.policy, percent(rate(engine))));
    }
    if let Some(bound) = bound {
        said.push_str(&format!(
            "; one that knew the future would have {}, so a better policy could win {:.0} points at most",
            percent(rate(bound)),
            100.0 * (rate(bound) - rate(best)).max(0.0)
        ));
    }
    let half = engine.at(0.5).map_or(0.0, |point| point.hit_rate);
    let quarter = rate(engine);
    said.push_str(&format!(
        ". Twice the memory brings {:.0} points.",
        100.0 * (half - quarter).max(0.0)
    ));
    Some(said)
}

fn domains(assessment: &Assessment, engine: &PolicyCurve) -> Option<String> {
    if assessment.domains.len() < 2 {
        return None;
    }
    let rate =
        |section: &Section| section.curve(&engine.policy)?.at(QUARTER).map(|point| point.hit_rate);
    let mut rates: Vec<(&str, f64)> = assessment
        .domains
        .iter()
        .filter_map(|section| Some((section.name.as_str(), rate(section)?)))
        .collect();
    rates.sort_by(|a, b| a.1.total_cmp(&b.1));
    let (worst, best) = (rates.first()?, rates.last()?);
    let mixed = rate(&assessment.mixed)?;
    let mut said = match best.1 - worst.1 < POINTS_WORTH_TELLING {
        true => format!("Domains are alike ({} of hits by themselves)", percent(best.1)),
        false => format!(
            "By themselves domains hit {} ({}) to {} ({})",
            percent(worst.1),
            worst.0,
            percent(best.1),
            best.0
        ),
    };
    said.push_str(&format!("; taken in turns all together {}", percent(mixed)));
    let over_time = &assessment.residency;
    if let (Some(after), Some(elsewhere)) =
        (over_time.misses_after_switch, over_time.misses_elsewhere)
    {
        said.push_str(&format!(
            ". The first tokens after a switch miss {after:.1} experts each, later ones {elsewhere:.1}"
        ));
    }
    said.push('.');
    Some(said)
}

/// What it needs on this machine: how much there is, and how fast it is with that and with less.
fn needs(memory_bytes: u64, weights_bytes: u64, predictions: &[Prediction]) -> String {
    let free = bytes(memory_bytes as f64);
    let (Some(least), Some(all)) = (predictions.first(), predictions.last()) else {
        let weights = bytes(weights_bytes as f64);
        return match weights_bytes <= memory_bytes {
            true => format!(
                "On this machine, with {free} for weights, all of it fits ({weights}): misses count only if you give it less."
            ),
            false => format!(
                "This machine has {free} for weights and its weights are {weights}: it will read from the disk while it runs."
            ),
        };
    };
    let told = |p: &Prediction| format!("about {} tokens/s", rate(p.tokens_per_second));
    let reaching = |wanted: f64| {
        let fast_enough = |p: &&Prediction| p.tokens_per_second >= wanted * all.tokens_per_second;
        bytes(predictions.iter().find(fast_enough).unwrap_or(all).ram_bytes as f64)
    };
    let whole = bytes(all.ram_bytes as f64);
    let with_this = predictions.iter().rev().find(|p| p.ram_bytes <= memory_bytes);
    let first = match with_this {
        Some(p) if p.ram_bytes == all.ram_bytes => {
            format!(
                "On this machine, with {free} for weights, all of it fits: {} with {whole}",
                told(all)
            )
        }
        Some(p) => format!(
            "This machine has {free} for weights and all of it needs {whole}: {} with {}, {} if everything fitted",
            told(p),
            bytes(p.ram_bytes as f64),
            told(all)
        ),
        None => format!(
            "This machine has {free} for weights and the least that works is {}; {} if everything fitted ({whole})",
            bytes(least.ram_bytes as f64),
            told(all)
        ),
    };
    format!(
        "{first}. Nine tenths of that speed need {}, half of it {}; the least that works, {}, gives {}.",
        reaching(0.9),
        reaching(0.5),
        bytes(least.ram_bytes as f64),
        told(least)
    )
}

fn rate(value: f64) -> String {
    match value {
        v if v < 10.0 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ram_bytes: u64, tokens_per_second: f64) -> Prediction {
        Prediction {
            ram_bytes,
            kept_share: 0.0,
            hit_rate: 0.0,
            read_bytes_per_token: 0.0,
            compute_seconds_per_token: 0.0,
            read_seconds_per_token: 0.0,
            tokens_per_second,
        }
    }

    #[test]
    fn what_a_model_needs_depends_on_the_machine() {
        let gib = |count: u64| count << 30;
        let table = [at(gib(1), 2.0), at(gib(4), 6.0), at(gib(8), 9.5), at(gib(10), 10.0)];
        let fits = needs(gib(16), gib(10), &table);
        assert_eq!(
            fits,
            "On this machine, with 16.0 GiB for weights, all of it fits: about 10 tokens/s with 10.0 GiB. Nine tenths of that \
             speed need 8.00 GiB, half of it 4.00 GiB; the least that works, 1.00 GiB, gives about 2.0 tokens/s."
        );
        let partly = needs(gib(5), gib(10), &table);
        assert!(
            partly.contains("all of it needs 10.0 GiB: about 6.0 tokens/s with 4.00 GiB"),
            "{partly}"
        );
        let hopeless = needs(gib(1) - 1, gib(10), &table);
        assert!(hopeless.contains("the least that works is 1.00 GiB"), "{hopeless}");
        // Without rates of the disk.
        assert!(needs(gib(16), gib(10), &[]).contains("all of it fits (10.0 GiB)"));
        assert!(needs(gib(5), gib(10), &[]).contains("will read from the disk"));
    }
}
