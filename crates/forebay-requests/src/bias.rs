//! Biases of tokens in the forms of OpenAI and of llama.cpp's server.

use serde_json::Value;

use crate::request::Refusal;

/// Largest bias.
const BIAS_MAX: f64 = 100.0;

/// What a bias is for.
#[derive(Debug, PartialEq)]
enum Biased<'a> {
    Token(u32),
    /// All tokens of a text.
    Text(&'a str),
}

/// Reads the biases of token ids in `logit_bias`: `{"7": -1}`, `[[7, -1]]` or `[{"id": 7, "bias": -1}]`. The bias `false` forbids a
/// token. The list is sorted by ids, because sums must not depend on an order.
///
/// # Errors
/// Returns an error if an id or a bias is none.
pub fn read(value: Option<&Value>) -> Result<Vec<(u32, f32)>, Refusal> {
    let of_token = |(biased, bias)| match biased {
        Biased::Token(id) => Some((id, bias)),
        Biased::Text(_) => None,
    };
    let mut biases: Vec<_> = all(value)?.into_iter().filter_map(of_token).collect();
    biases.sort_by_key(|(id, _)| *id);
    Ok(biases)
}

/// Reads the biases of texts in `logit_bias`, as llama.cpp's server has them: `{" the": -1}` or `[[" the", -1]]`. A number is an id
/// there, too.
///
/// # Errors
/// Returns an error if an id or a bias is none.
pub fn texts(value: Option<&Value>) -> Result<Vec<(String, f32)>, Refusal> {
    let of_text = |(biased, bias)| match biased {
        Biased::Token(_) => None,
        Biased::Text(text) => Some((text.to_owned(), bias)),
    };
    Ok(all(value)?.into_iter().filter_map(of_text).collect())
}

/// Reads all biases in their order.
fn all(value: Option<&Value>) -> Result<Vec<(Biased<'_>, f32)>, Refusal> {
    match value {
        None => Ok(Vec::new()),
        Some(Value::Object(fields)) => fields
            .iter()
            .map(|(name, value)| Ok::<_, Refusal>((of_text(name)?, bias(value)?)))
            .collect(),
        Some(Value::Array(pairs)) => pairs.iter().map(pair).collect(),
        Some(_) => Err(wrong("must be an object or a list")),
    }
}

fn wrong(why: &str) -> Refusal {
    Refusal::of("logit_bias", format!("logit_bias {why}"))
}

fn pair(value: &Value) -> Result<(Biased<'_>, f32), Refusal> {
    match value {
        Value::Array(pair) if pair.len() == 2 => Ok((biased(&pair[0])?, bias(&pair[1])?)),
        Value::Object(fields) if fields.contains_key("id") && fields.contains_key("bias") => {
            Ok((biased(&fields["id"])?, bias(&fields["bias"])?))
        }
        _ => Err(wrong("needs pairs of an id and a bias")),
    }
}

fn biased(value: &Value) -> Result<Biased<'_>, Refusal> {
    let is_id = |id: &f64| id.fract() == 0.0 && (0.0..4e9).contains(id);
    match value {
        Value::String(text) => of_text(text),
        value => match value.as_f64().filter(is_id) {
            Some(id) => Ok(Biased::Token(id as u32)),
            None => Err(wrong(&format!("has {value}, which is no token id"))),
        },
    }
}

/// Reads an id that is written as a text, or a text.
fn of_text(text: &str) -> Result<Biased<'_>, Refusal> {
    match text.parse() {
        Ok(id) => Ok(Biased::Token(id)),
        // A number that is negative, too large or not whole is meant as an id.
        Err(_) if text.is_empty() || is_number(text) => {
            Err(wrong(&format!("has {text:?}, which is no token id")))
        }
        Err(_) => Ok(Biased::Text(text)),
    }
}

/// Returns true if a text is a number in digits.
fn is_number(text: &str) -> bool {
    text.parse::<f64>().is_ok() && text.contains(|c: char| c.is_ascii_digit())
}

fn bias(value: &Value) -> Result<f32, Refusal> {
    match value {
        Value::Bool(false) => Ok(f32::NEG_INFINITY),
        value => match value.as_f64().filter(|bias| (-BIAS_MAX..=BIAS_MAX).contains(bias)) {
            Some(bias) => Ok(bias as f32),
            None => Err(wrong(&format!(
                "has {value}: it must be between -{BIAS_MAX} and {BIAS_MAX}, or false"
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
            assert_eq!(texts(Some(&form)), Ok(Vec::new()), "{form}");
        }
        assert_eq!((read(None), texts(None)), (Ok(Vec::new()), Ok(Vec::new())));
        for form in [
            json!([[1]]),
            json!([[1, 101]]),
            json!([[1, true]]),
            json!([[1.5, 1]]),
            json!({ "-1": 1 }),
            json!({ "1.5": 1 }),
            json!({ "": 1 }),
            json!({ "a": 101 }),
        ] {
            let refused = [read(Some(&form)).unwrap_err(), texts(Some(&form)).unwrap_err()];
            for refusal in refused {
                assert_eq!(refusal.param.as_deref(), Some("logit_bias"), "{form}");
            }
        }
    }

    #[test]
    fn texts_have_biases_too() {
        for text in [" the", "infinity", "7th"] {
            for form in [json!({ text: -1, "7": 2 }), json!([[text, -1], [7, 2]])] {
                assert_eq!(texts(Some(&form)), Ok(vec![(text.to_owned(), -1.0)]), "{form}");
                assert_eq!(read(Some(&form)), Ok(vec![(7, 2.0)]), "{form}");
            }
        }
    }
}
