//! Variables that a template gives a default, as in `{% set thinking = thinking | default(true) %}`.

use std::collections::HashSet;

use minijinja::machinery::{Token, tokenize};
use minijinja::syntax::SyntaxConfig;

/// Returns the variables whose first place in the template is an assignment that reads them. For the engine these are
/// declared by the template, but their value comes from the caller.
pub fn variables_with_defaults(source: &str, syntax: SyntaxConfig) -> Vec<String> {
    let (mut found, mut seen) = (Vec::new(), HashSet::new());
    let mut place = Place::Other;
    let mut follows_dot = false;
    for token in tokenize(source, false, syntax) {
        // A template that is not valid has no variables.
        let Ok((token, _)) = token else { break };
        place = match (place, &token) {
            (_, Token::BlockStart) => Place::Block,
            (Place::Block, Token::Ident("set")) => Place::Set,
            (Place::Set, Token::Ident(name)) if !seen.contains(name) => Place::Name(name),
            (Place::Name(name), Token::Assign) => Place::Value(name),
            (Place::Value(name), Token::BlockEnd) => {
                seen.insert(name);
                Place::Other
            }
            (Place::Value(name), Token::Ident(read)) if *read == name && !follows_dot => {
                found.push(name.to_owned());
                Place::Other
            }
            (Place::Value(name), _) => Place::Value(name),
            _ => Place::Other,
        };
        match &token {
            // The name that is assigned counts as seen after its assignment.
            Token::Ident(name) if !follows_dot && !matches!(place, Place::Name(_)) => {
                seen.insert(name);
            }
            _ => {}
        }
        follows_dot = matches!(token, Token::Dot);
    }
    found
}

/// Part of the template that the next token belongs to.
#[derive(Clone, Copy)]
enum Place<'a> {
    /// The beginning of `{% ... %}`.
    Block,
    /// Behind `set`.
    Set,
    /// Behind the name that is assigned.
    Name(&'a str),
    /// The value that the name gets.
    Value(&'a str),
    Other,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_read_before_they_are_set() {
        let find = |source: &str| variables_with_defaults(source, SyntaxConfig::default());
        for (source, expected) in [
            ("{%- set x = x if x is defined else true %}{{ x }}", vec!["x"]),
            ("{% set x = true %}{% set x = x | default(1) %}", vec![]),
            ("{# x #}{% set y = x.y %}{% set x = f(x) %}{% set z = 1 + z %}", vec!["z"]),
            ("{% for x in l %}{% set x = x | trim %}{% endfor %}", vec![]),
            ("{% macro m(x) %}{% set x = x | trim %}{% endmacro %}", vec![]),
            ("{% set ns.x = ns.x + 1 %}{% set a, b = a %}{% set c %}{{ c }}{% endset %}", vec![]),
            ("x {% set a = [a, a] %}{% set", vec!["a"]),
        ] {
            assert_eq!(find(source), expected, "{source}");
        }
    }
}
