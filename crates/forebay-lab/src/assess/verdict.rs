//! States the verdict of an assessment in sentences that tell the user what to do.

use forebay_options::OptionName;

use super::assessment::{Assessment, COMFORTABLE_HIT_RATE, GOOD_HIT_RATE, Section};
use super::predict::{Prediction, Predictions};
use super::sweep::PolicyCurve;
use crate::page::{bytes, percent};

/// Share of the experts at which models are compared.
const QUARTER: f64 = 0.25;
/// Fewest generated tokens and prompts from which a verdict is drawn.
const TOKENS_MIN: usize = 200;
const PROMPTS_MIN: usize = 5;
/// A token of a trained model shares more experts with the token before it than chance gives, by at least this factor.
const ABOVE_CHANCE: f64 = 1.15;
/// Smallest difference of hit rates between domains that the verdict mentions.
const POINTS_WORTH_TELLING: f64 = 0.03;

/// Returns the verdict, one paragraph per element.
pub fn words(assessment: &Assessment) -> Vec<String> {
    let mixed = &assessment.mixed;
    let Some(engine) = mixed.curves.first() else { return Vec::new() };
    let mut said = Vec::new();
    match is_sound(assessment) {
        Err(why) => said.push(format!("No verdict: {why}")),
        Ok(()) => {
            said.extend([judgement(assessment, engine), capacities(assessment, engine)]);
            said.extend(cliff(assessment, engine));
            said.extend(policies(mixed, engine));
            said.extend(domains(assessment, engine));
        }
    }
    let predictions = assessment.predictions.as_ref();
    said.push(needs(assessment.memory_bytes, assessment.weights_bytes, predictions));
    said.extend(predictions.and_then(on_gpu));
    said
}

/// Returns the reason why the recording says nothing about a model's locality, if there is one.
fn is_sound(assessment: &Assessment) -> Result<(), String> {
    let locality = &assessment.mixed.locality;
    let prompts = assessment.prompts.iter().filter(|prompt| prompt.generated_tokens > 0).count();
    let tokens = locality.generated_tokens;
    if tokens < TOKENS_MIN || prompts < PROMPTS_MIN {
        let plural =
            |count, one: &str| format!("{count} {one}{}", if count == 1 { "" } else { "s" });
        return Err(format!(
            "{} after {} are too few. Give at least {TOKENS_MIN} after {PROMPTS_MIN} prompts: {}, {}.",
            plural(tokens, "generated token"),
            plural(prompts, "prompt"),
            OptionName::Tokens,
            OptionName::Prompts
        ));
    }
    if locality.token_overlap <= ABOVE_CHANCE * locality.chance_overlap {
        return Err(format!(
            "the routing does not follow the text. A token shares {} of its experts with the token before it, and chance \
             alone gives {}. The weights of this model look random.",
            percent(locality.token_overlap),
            percent(locality.chance_overlap)
        ));
    }
    Ok(())
}

/// Returns the hit rate's distance to the ends of its interval, in words.
fn plus_minus(interval: Option<[f64; 2]>) -> String {
    let wide =
        |[low, high]: [f64; 2]| format!(" (± {:.1} points over prompts)", 50.0 * (high - low));
    interval.map_or_else(String::new, wide)
}

fn judgement(assessment: &Assessment, engine: &PolicyCurve) -> String {
    let quarter = engine.at(QUARTER);
    let misses = quarter.map_or(1.0, |point| 1.0 - point.hit_rate);
    let spread = plus_minus(quarter.and_then(|point| point.hit_rate_interval));
    let overlap = percent(assessment.mixed.locality.token_overlap);
    let k = assessment.experts_per_token;
    let word = match misses {
        m if m <= 0.10 => "very good locality",
        m if m <= 0.25 => "good locality",
        m if m <= 0.45 => "moderate locality",
        _ => "poor locality",
    };
    let first = format!(
        "{word}: with a quarter of the experts in memory {} of accesses miss{spread}; a token shares {overlap} of its {k} experts \
         per layer with the token before it",
        percent(misses)
    );
    match misses {
        m if m <= 0.25 => format!("{first}. It runs well from a cache much smaller than itself."),
        m if m <= 0.45 => format!(
            "{first}. A small cache helps, but half of it or more is needed for most of the speed."
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
    // Finds the largest capacity of the curve that is smaller than one token's cycle.
    let below = lru.points.iter().rposition(|point| (point.capacity_bytes as f64) < cycle)?;
    let (global, layered) = (lru.points.get(below)?, engine.points.get(below)?);
    Some(format!(
        "The cliff: one token's experts in all layers are {} ({} of all). A global LRU list below that has forgotten \
         every expert before it is used again: at {} it hits {} where {} hits {}.",
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

/// Returns the sentence about RAM: how much this machine has, and the CPU speed with that much and
/// with less.
fn needs(memory_bytes: u64, weights_bytes: u64, predictions: Option<&Predictions>) -> String {
    let free = bytes(memory_bytes as f64);
    let curve = predictions.map_or(&[][..], |predictions| &predictions.by_ram);
    let (Some(predictions), Some(least), Some(all)) = (predictions, curve.first(), curve.last())
    else {
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
    let machine = &predictions.machine;
    let whole = bytes(all.ram_bytes as f64);
    let with_this = curve.iter().rev().find(|p| p.ram_bytes <= memory_bytes);
    let first = match with_this {
        Some(p) if p.ram_bytes == all.ram_bytes => {
            format!(
                "On the CPU of {machine}, with {free} for weights, all of it fits: {} with {whole}",
                told(all)
            )
        }
        Some(p) => format!(
            "On the CPU of {machine} there is {free} for weights and all of it needs {whole}: {} with {}, {} if everything fitted",
            told(p),
            bytes(p.ram_bytes as f64),
            told(all)
        ),
        None => format!(
            "On the CPU of {machine} there is {free} for weights and the least that works is {}; {} if everything fitted ({whole})",
            bytes(least.ram_bytes as f64),
            told(all)
        ),
    };
    format!("{first}. {}.", steps(curve, least, all))
}

/// Returns the sentence about VRAM: the GPU speed with all VRAM and with less, and the cost of less
/// RAM beside it.
fn on_gpu(predictions: &Predictions) -> Option<String> {
    let curve = predictions.by_vram.first()?;
    let (least, most) = (curve.points.first()?, curve.points.last()?);
    let vram = bytes(most.budget_bytes() as f64);
    let mut said = format!(
        "On the GPU of {} ({}): {} with {vram} of VRAM, {}",
        predictions.machine,
        predictions.gpu.as_deref()?,
        told(most),
        match most.kept_share < 1.0 {
            true => format!("all that it has, and {} of RAM", bytes(curve.ram_bytes as f64)),
            false => "where all of it fits".to_owned(),
        }
    );
    if least.budget_bytes() < most.budget_bytes() {
        said.push_str(&format!(". {}", steps(&curve.points, least, most)));
    }
    let half = reaching(&curve.points, 0.5, most);
    let less = predictions.by_vram.last().filter(|less| less.ram_bytes < curve.ram_bytes);
    let same = |p: &&Prediction| p.vram_bytes == half.vram_bytes;
    if half.kept_share < 1.0
        && let Some((less, with_less)) =
            less.and_then(|less| Some((less, less.points.iter().find(same)?)))
    {
        said.push_str(&format!(
            ". At {} of VRAM, {} of RAM instead of {} leave {} of {}",
            bytes(half.budget_bytes() as f64),
            bytes(less.ram_bytes as f64),
            bytes(curve.ram_bytes as f64),
            told(with_less),
            rate(half.tokens_per_second)
        ));
    }
    said.push('.');
    Some(said)
}

/// Returns the budgets that reach nine tenths and half of the speed with the most memory.
fn steps(curve: &[Prediction], least: &Prediction, most: &Prediction) -> String {
    let size = |p: &Prediction| bytes(p.budget_bytes() as f64);
    format!(
        "Nine tenths of that speed need {}, half of it {}; the least that works, {}, gives {}",
        size(reaching(curve, 0.9, most)),
        size(reaching(curve, 0.5, most)),
        size(least),
        told(least)
    )
}

/// Returns the smallest budget that reaches `share` of the speed of `most`.
fn reaching<'a>(curve: &'a [Prediction], share: f64, most: &'a Prediction) -> &'a Prediction {
    let wanted = share * most.tokens_per_second;
    curve.iter().find(|p| p.tokens_per_second >= wanted).unwrap_or(most)
}

fn told(prediction: &Prediction) -> String {
    format!("about {} tokens/s", rate(prediction.tokens_per_second))
}

fn rate(value: f64) -> String {
    match value {
        v if v < 10.0 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::VramCurve;
    use super::*;
    use forebay_engine::plan::Cost;

    fn at(vram_bytes: Option<u64>, ram_bytes: u64, tokens_per_second: f64) -> Prediction {
        Prediction {
            vram_bytes,
            ram_bytes,
            kept_share: 0.5,
            hit_rate: 0.0,
            read_bytes_per_token: 0.0,
            limit: Cost::Disk,
            costs: Vec::new(),
            tokens_per_second,
        }
    }

    fn gib(count: u64) -> u64 {
        count << 30
    }

    fn predictions() -> Predictions {
        let by_ram = [(1, 2.0), (4, 6.0), (8, 9.5), (10, 10.0)];
        Predictions {
            machine: "this machine".to_owned(),
            gpu: Some("a card".to_owned()),
            by_ram: by_ram.map(|(ram, rate)| at(None, gib(ram), rate)).to_vec(),
            by_vram: Vec::new(),
            not_on_gpu: None,
        }
    }

    #[test]
    fn what_a_model_needs_depends_on_the_machine() {
        let table = predictions();
        let fits = needs(gib(16), gib(10), Some(&table));
        assert_eq!(
            fits,
            "On the CPU of this machine, with 16.0 GiB for weights, all of it fits: about 10 tokens/s with 10.0 GiB. \
             Nine tenths of that speed need 8.00 GiB, half of it 4.00 GiB; the least that works, 1.00 GiB, gives about 2.0 \
             tokens/s."
        );
        let partly = needs(gib(5), gib(10), Some(&table));
        assert!(
            partly.contains("all of it needs 10.0 GiB: about 6.0 tokens/s with 4.00 GiB"),
            "{partly}"
        );
        let hopeless = needs(gib(1) - 1, gib(10), Some(&table));
        assert!(hopeless.contains("the least that works is 1.00 GiB"), "{hopeless}");
        // Without a machine profile.
        assert!(needs(gib(16), gib(10), None).contains("all of it fits (10.0 GiB)"));
        assert!(needs(gib(5), gib(10), None).contains("will read from the disk"));
    }

    #[test]
    fn a_gpu_is_told_with_what_it_holds_and_with_less_ram() {
        let mut table = predictions();
        assert_eq!(on_gpu(&table), None);
        let curve = |ram: u64, rates: [f64; 4]| VramCurve {
            ram_bytes: gib(ram),
            points: std::iter::zip([2, 4, 7, 8], rates)
                .map(|(vram, rate)| at(Some(gib(vram)), gib(ram), rate))
                .collect(),
        };
        table.by_vram =
            vec![curve(16, [20.0, 40.0, 60.0, 64.0]), curve(4, [5.0, 11.0, 20.0, 64.0])];
        assert_eq!(
            on_gpu(&table).unwrap(),
            "On the GPU of this machine (a card): about 64 tokens/s with 8.00 GiB of VRAM, all that it has, and 16.0 GiB of \
             RAM. Nine tenths of that speed need 7.00 GiB, half of it 4.00 GiB; the least that works, 2.00 GiB, gives about 20 \
             tokens/s. At 4.00 GiB of VRAM, 4.00 GiB of RAM instead of 16.0 GiB leave about 11 tokens/s of 40."
        );
        // With a model that fits.
        table.by_vram.truncate(1);
        table.by_vram[0].points[3].kept_share = 1.0;
        let fits = on_gpu(&table).unwrap();
        assert!(fits.contains("with 8.00 GiB of VRAM, where all of it fits. Nine"), "{fits}");
        assert!(fits.ends_with("gives about 20 tokens/s."), "{fits}");
    }
}
