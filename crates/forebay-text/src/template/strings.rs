//! Methods of Python's strings and filters of Jinja that the engine does not have.

use minijinja::value::{Kwargs, from_args};
use minijinja::{Environment, Error, ErrorKind, Value};

/// Longest text that padding makes, in characters.
const WIDTH_MAX: usize = 1 << 20;

/// Adds the filters.
pub fn install(environment: &mut Environment<'static>) {
    environment.add_filter("center", |text: Value, width: Option<usize>| {
        padded(&text.to_string(), "center", width.unwrap_or(80), ' ')
    });
    environment.add_filter("wordcount", |text: Value| {
        let text = text.to_string();
        let is_word = |character: char| character.is_alphanumeric() || character == '_';
        text.split(|character| !is_word(character)).filter(|word| !word.is_empty()).count()
    });
    environment.add_filter("truncate", truncate);
    environment.add_filter("striptags", minijinja_contrib::filters::striptags);
}

/// Calls a method of a text. Returns `None` if there is no such method here.
pub fn method(text: &str, method: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    Some(match method {
        "center" | "ljust" | "rjust" => {
            from_args(args).and_then(|(width, fill): (usize, Option<char>)| {
                padded(text, method, width, fill.unwrap_or(' ')).map(Value::from)
            })
        }
        "zfill" => from_args(args).and_then(|(width,): (usize,)| {
            let digits = text.trim_start_matches(['+', '-']);
            let sign = &text[..text.len() - digits.len()];
            let width = width.saturating_sub(sign.len());
            Ok(Value::from(sign.to_owned() + &padded(digits, "rjust", width, '0')?))
        }),
        "index" | "rindex" => from_args(args).and_then(|(wanted,): (&str,)| {
            let found = if method == "index" { text.find(wanted) } else { text.rfind(wanted) };
            let missing = || Error::new(ErrorKind::InvalidOperation, "substring not found");
            Ok(Value::from(text[..found.ok_or_else(missing)?].chars().count()))
        }),
        _ => return None,
    })
}

fn padded(text: &str, side: &str, width: usize, fill: char) -> Result<String, Error> {
    if width > WIDTH_MAX {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("{side}: {width} is too wide"),
        ));
    }
    let padding = width.saturating_sub(text.chars().count());
    let before = match side {
        "ljust" => 0,
        "rjust" => padding,
        // Python puts the odd one before the text if the width is odd.
        _ => padding / 2 + (padding & width & 1),
    };
    let fill = |count: usize| fill.to_string().repeat(count);
    Ok(fill(before) + text + &fill(padding - before))
}

/// Implements `truncate(length, killwords, end, leeway=5)`.
fn truncate(
    text: Value,
    length: Option<usize>,
    killwords: Option<bool>,
    end: Option<String>,
    named: Kwargs,
) -> Result<String, Error> {
    let text = text.to_string();
    let length = named.get::<Option<usize>>("length")?.or(length).unwrap_or(255);
    let killwords = named.get::<Option<bool>>("killwords")?.or(killwords).unwrap_or(false);
    let end = named.get::<Option<String>>("end")?.or(end).unwrap_or_else(|| "...".to_owned());
    let leeway = named.get::<Option<usize>>("leeway")?.unwrap_or(5);
    named.assert_all_used()?;
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text);
    }
    let kept: String = text.chars().take(length.saturating_sub(end.chars().count())).collect();
    match kept.rsplit_once(' ') {
        Some((words, _)) if !killwords => Ok(words.to_owned() + &end),
        _ => Ok(kept + &end),
    }
}
