//! Parsers of option values, which `/set` in a chat also uses.

use std::time::Duration;

use forebay_engine::KvInVram;

use super::Parallel;
use crate::size;

/// Parses the VRAM for keys and values: a size or `auto`.
pub fn kv_vram(text: &str) -> Result<KvInVram, String> {
    match text {
        "auto" => Ok(KvInVram::AsMuchAsFits),
        size => size::parse(size).map(KvInVram::Bytes).map_err(|error| error.to_string()),
    }
}

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

/// Parses a time with a unit, such as `200ms` or `2s`.
pub fn duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = match (text.strip_suffix("ms"), text.strip_suffix('s')) {
        (Some(number), _) => (number, 1e-3),
        (None, Some(number)) => (number, 1.0),
        (None, None) => return Err("must be a time such as 200ms or 2s".to_owned()),
    };
    let seconds = number.trim().parse::<f64>().ok().map(|number| number * unit);
    let seconds = seconds.filter(|seconds| seconds.is_finite() && *seconds > 0.0);
    let time = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    time.ok_or_else(|| "must be a time above 0, such as 200ms or 2s".to_owned())
}

pub fn parallel(text: &str) -> Result<Parallel, String> {
    match (text, text.parse()) {
        ("auto", _) => Ok(Parallel::Auto),
        (_, Ok(number)) if number > 0 => Ok(Parallel::Fixed(number)),
        _ => Err("must be auto or a number of at least 1".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use crate::args::Device;

    #[test]
    fn devices() {
        assert_eq!("cuda:3".parse(), Ok(Device::Cuda(Some(3))));
        assert_eq!("auto".parse(), Ok(Device::Auto));
        for wrong in ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "CPU"] {
            assert!(wrong.parse::<Device>().is_err(), "{wrong}");
        }
    }
}
