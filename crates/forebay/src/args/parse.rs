//! Parsers of option values, which `/set` in a chat also uses.

use super::Parallel;

pub fn non_negative(text: &str) -> Result<f32, String> {
    number(text, |x| x >= 0.0, "must be a number of at least 0")
}

pub fn positive(text: &str) -> Result<f32, String> {
    number(text, |x| x > 0.0, "must be a number above 0")
}

pub fn probability(text: &str) -> Result<f32, String> {
    number(text, |x| (0.0..=1.0).contains(&x), "must be a number from 0 to 1")
}

fn number(text: &str, good: impl Fn(f32) -> bool, wanted: &str) -> Result<f32, String> {
    text.parse().ok().filter(|&x: &f32| x.is_finite() && good(x)).ok_or_else(|| wanted.to_string())
}

pub fn parallel(text: &str) -> Result<Parallel, String> {
    match (text, text.parse()) {
        ("auto", _) => Ok(Parallel::Auto),
        (_, Ok(number)) if number > 0 => Ok(Parallel::Fixed(number)),
        _ => Err("must be auto or a number of at least 1".to_owned()),
    }
}
