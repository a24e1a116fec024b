//! Bounds of numbers and times. Without them, a model could write digits forever.

use serde_json::{Map, Value, json};

use super::has_one;

/// Largest whole number unless the schema allows larger ones.
const WHOLE_MAX: i64 = 1_000_000_000_000_000_000;
/// Largest number with a fraction unless the schema allows larger ones.
const NUMBER_MAX: i64 = 1_000_000_000_000_000;
/// Digits behind the point.
const FRACTION: f64 = 1e-9;

/// Times with at most nine digits of a second, and without leap seconds. The parser would allow second 60 at any time, but
/// RFC 3339 allows it only at the end of a month.
const SECONDS: &str = r"^[^:]*:[0-9]{2}:[0-5][0-9](\.[0-9]{1,9})?([zZ]|[+-][0-9:]*)$";

/// Durations with at most nine digits in each part.
const PARTS: &str = r"^P([^0-9]*[0-9]{1,9}[A-Z])+$";

/// Returns the schema of a number.
pub fn number() -> Value {
    let mut fields = Map::new();
    fields.insert("type".to_owned(), "number".into());
    limit(&mut fields);
    fields.into()
}

/// Returns true if a schema has bounds for numbers.
pub fn has_bounds(fields: &Map<String, Value>) -> bool {
    has_one(fields, &["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"])
}

/// Returns a number of items or characters, if it is a whole one.
pub fn count(value: &Value) -> Option<Value> {
    let number = value.as_f64().filter(|number| *number >= 0.0 && number.fract() == 0.0)?;
    Some((number as u64).into())
}

/// Adds bounds to the numbers and times of a schema.
pub fn limit(fields: &mut Map<String, Value>) {
    let kinds: Vec<&str> = match fields.get("type") {
        Some(Value::String(kind)) => vec![kind],
        Some(Value::Array(kinds)) => kinds.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    let (is_number, is_whole) = (kinds.contains(&"number"), kinds.contains(&"integer"));
    if (is_number || is_whole) && !has_one(fields, &["const", "enum"]) {
        limit_number(fields, is_number);
    }
    let pattern = match fields.get("format").and_then(Value::as_str) {
        Some("time" | "date-time") => SECONDS,
        Some("duration") => PARTS,
        _ => return,
    };
    let all = fields.entry("allOf").or_insert_with(|| json!([]));
    let bound = json!({ "type": "string", "pattern": pattern });
    if let Value::Array(all) = all
        && !all.contains(&bound)
    {
        all.push(bound);
    }
}

fn limit_number(fields: &mut Map<String, Value>, is_number: bool) {
    let most = if is_number { NUMBER_MAX } else { WHOLE_MAX };
    let number = |name: &str| fields.get(name).and_then(Value::as_f64);
    let low = number("minimum").or(number("exclusiveMinimum"));
    let high = number("maximum").or(number("exclusiveMaximum"));
    let limit = most as f64;
    if high.is_none() && low.is_none_or(|low| low < limit) {
        fields.insert("maximum".to_owned(), most.into());
    }
    if low.is_none() && high.is_none_or(|high| high > -limit) {
        fields.insert("minimum".to_owned(), (-most).into());
    }
    // Bounds may be nearer to each other than the last digit.
    let is_small = |bound: Option<f64>| bound.is_some_and(|at| at != 0.0 && at.abs() < 1e-6);
    if is_number && !fields.contains_key("multipleOf") && !is_small(low) && !is_small(high) {
        fields.insert("multipleOf".to_owned(), FRACTION.into());
    }
}
