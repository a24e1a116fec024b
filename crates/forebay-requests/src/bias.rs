//! Biases of tokens in the forms of OpenAI and of llama.cpp's server.

use serde_json::Value;

use crate::request::Refusal;

/// Largest bias.
const BIAS_MAX: f64 = 100.0;

/// Reads `logit_bias`: `{"7": -1}`, `[[7, -1]]` or `[{"id": 7, "bias": -1}]`. The bias `false` forbids a token. The list is sorted
/// by ids, because sums must not depend on an order.
///
/// # Errors
/// Returns an error if an id or a bias is none.
pub fn read(value: Option<&Value>) -> Result<Vec<(u32, f32)>, Refusal> {
    let mut biases = match value {
        None => Vec::new(),
        Some(Value::Object(fields)) => fields
            .iter()
            .map(|(id, bias)| of(&Value::String(id.clone()), bias))
            .collect::<Result<_, _>>()?,
        Some(Value::Array(pairs)) => pairs.iter().map(pair).collect::<Result<_, _>>()?,
        Some(_) => return Err(wrong("must be an object or a list")),
    };
    biases.sort_unstable_by_key(|(id, _)| *id);
    Ok(biases)
}

fn wrong(why: &str) -> Refusal {
    Refusal::of("logit_bias", format!("logit_bias {why}"))
}

fn pair(value: &Value) -> Result<(u32, f32), Refusal> {
    match value {
        Value::Array(pair) if pair.len() == 2 => of(&pair[0], &pair[1]),
        Value::Object(fields) if fields.contains_key("id") && fields.contains_key("bias") => {
            of(&fields["id"], &fields["bias"])
        }
        _ => Err(wrong("needs pairs of an id and a bias")),
    }
}

fn of(id: &Value, bias: &Value) -> Result<(u32, f32), Refusal> {
    let number = match id {
        Value::String(text) => text.parse().ok(),
        id => id
            .as_f64()
            .filter(|id| id.fract() == 0.0 && (0.0..4e9).contains(id))
            .map(|id| id as u32),
    };
    let number = number.ok_or_else(|| wrong(&format!("has {id}, which is no token id")))?;
    match bias {
        Value::Bool(false) => Ok((number, f32::NEG_INFINITY)),
        bias => match bias.as_f64().filter(|bias| (-BIAS_MAX..=BIAS_MAX).contains(bias)) {
            Some(bias) => Ok((number, bias as f32)),
            None => Err(wrong(&format!(
                "has {bias}: it must be between -{BIAS_MAX} and {BIAS_MAX}, or false"
            ))),
        },
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn all_forms_say_the_same() {
        let expected = vec![(3, f32::NEG_INFINITY), (7, -1.0)];
        for form in [
            json!({ "7": -1, "3": false }),
            json!([[7, -1.0], [3, false]]),
            json!([["3", false], [7.0, -1]]),
            json!([{ "id": 7, "bias": -1 }, { "id": 3, "bias": false }]),
        ] {
            assert_eq!(read(Some(&form)), Ok(expected.clone()), "{form}");
        }
        assert_eq!(read(None), Ok(Vec::new()));
        for form in [
            json!({ "a": 1 }),
            json!([[1]]),
            json!([[1, 101]]),
            json!([[1, true]]),
            json!([[1.5, 1]]),
        ] {
            assert_eq!(
                read(Some(&form)).unwrap_err().param.as_deref(),
                Some("logit_bias"),
                "{form}"
            );
        }
    }
}
