//! Regular expressions of schemas.

use std::collections::BTreeSet;

use llguidance::derivre::{RegexAst, RegexBuilder};
use llguidance::regex_to_lark;
use serde_json::{Map, Value};

use crate::bounds;

/// Most work to find out that two expressions never match the same name.
const WORK_MAX: u64 = 10_000;

/// Returns the regular expressions of a schema that the compiler cannot follow, such as those that look ahead.
pub fn bad(schema: &Value) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    collect(schema, &mut all);
    if all.is_empty() {
        return all;
    }
    let own = all.clone();
    let check = move || own.into_iter().filter(|pattern| !is_good(pattern)).collect();
    // What takes too long is not followed either.
    bounds::run(check).unwrap_or(all)
}

fn is_good(pattern: &str) -> bool {
    let ast = RegexAst::SearchRegex(regex_to_lark(pattern, "dw"));
    RegexBuilder::new().mk(&ast).is_ok()
}

fn collect(schema: &Value, all: &mut BTreeSet<String>) {
    match schema {
        Value::Array(values) => values.iter().for_each(|value| collect(value, all)),
        Value::Object(fields) => {
            for (name, value) in fields {
                match (name.as_str(), value) {
                    ("const" | "enum" | "default" | "examples", _) => {}
                    ("pattern", Value::String(text)) => {
                        all.insert(text.clone());
                    }
                    ("patternProperties", Value::Object(patterns)) => {
                        all.extend(patterns.keys().cloned());
                        patterns.values().for_each(|value| collect(value, all));
                    }
                    (_, value) => collect(value, all),
                }
            }
        }
        _ => {}
    }
}

/// Returns true if it is sure that no name matches two of the expressions.
pub fn are_disjoint(all: &Map<String, Value>) -> bool {
    if all.len() < 2 {
        return true;
    }
    let patterns: Vec<String> = all.keys().cloned().collect();
    bounds::run(move || disjoint(&patterns).unwrap_or(false)).unwrap_or(false)
}

fn disjoint(patterns: &[String]) -> Option<bool> {
    let mut builder = RegexBuilder::new();
    let mut found = Vec::new();
    for pattern in patterns {
        found.push(builder.mk(&RegexAst::SearchRegex(regex_to_lark(pattern, "dw"))).ok()?);
    }
    for (index, one) in found.iter().enumerate() {
        for other in &found[index + 1..] {
            let both = [one, other].map(|expression| RegexAst::ExprRef(*expression));
            let both = builder.mk(&RegexAst::And(both.to_vec())).ok()?;
            if !builder.to_regex_limited(both, WORK_MAX).ok()?.always_empty() {
                return Some(false);
            }
        }
    }
    Some(true)
}
