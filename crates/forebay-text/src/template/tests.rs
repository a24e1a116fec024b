use serde_json::json;

use super::program::SOURCE_BYTES_MAX;
use super::*;

fn render(source: &str, input: &RenderInput) -> Result<String, TextError> {
    ChatTemplate::from_source(source, "<s>", "</s>")?.render(input)
}

fn plain(source: &str) -> Result<String, TextError> {
    render(source, &RenderInput::default())
}

#[test]
fn tokens_variables_and_generation_blocks() {
    let source = "{{ bos_token }}{% for m in messages %}\n{% generation %}\n{{ m.content | trim }}\n\
                  {% endgeneration %}\n{% endfor %}{{ eos_token }}{{ x }}{{ tools is none }}";
    let input = RenderInput {
        messages: json!([{"role": "user", "content": " a "}, {"role": "user", "content": "b"}]),
        variables: [("x".to_owned(), json!(1.0)), ("eos_token".to_owned(), json!("E"))]
            .into_iter()
            .collect(),
        ..RenderInput::default()
    };
    assert_eq!(render(source, &input).unwrap(), "<s>a\nb\nE1.0True");
}

#[test]
fn assignments_inside_a_generation_block_stay_there() {
    let source = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}";
    assert_eq!(plain(source).unwrap(), "21");
}

#[test]
fn loop_controls_and_python_methods() {
    let source = "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}\
                  {% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}\
                  {{ ' a b '.strip().split(' ')[-1].upper() }}{{ {'k': 1}.get('z', 'd') }}";
    assert_eq!(plain(source).unwrap(), "02Bd");
}

#[test]
fn exceptions_are_told_apart_from_failures() {
    let refused = plain("{{ raise_exception('no ' ~ 'way') }}").unwrap_err();
    assert!(matches!(&refused, TextError::TemplateRefused { message } if message == "no way"));
    let inside = "{% macro m() %}{{ raise_exception('deep') }}{% endmacro %}{{ m() }}";
    assert!(matches!(plain(inside), Err(TextError::TemplateRefused { .. })));
    assert!(matches!(plain("{{ a.b.c }}"), Err(TextError::TemplateFailed { .. })));
    assert!(matches!(plain("{% if %}"), Err(TextError::TemplateSyntax { .. })));
    assert!(matches!(plain("{% include 'x' %}"), Err(TextError::TemplateFailed { .. })));
}

#[test]
fn hostile_templates_come_to_an_end() {
    let forever =
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ b }}{% endfor %}{% endfor %}";
    assert!(matches!(plain(forever), Err(TextError::TemplateFailed { .. })));
    let recursion = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}";
    assert!(matches!(plain(recursion), Err(TextError::TemplateFailed { .. })));
    let long = "{{ 'x' * 999999999999 }}";
    assert!(matches!(plain(long), Err(TextError::TemplateFailed { .. })));
}

#[test]
fn deep_values_do_not_overflow_the_stack() {
    let nest = |times: usize| {
        let list = format!("{}ns.x{}", "[".repeat(20), "]".repeat(20));
        format!(
            "{{% set ns = namespace(x=[]) %}}{{% for a in range({times}) %}}\
             {{% set ns.x = {list} %}}{{% endfor %}}"
        )
    };
    let printed = plain(&(nest(6000) + "{{ ns.x }}")).unwrap();
    assert_eq!(printed.len(), 2 * 120_001);
    assert!(plain(&(nest(6000) + "{{ ns.x == [ns.x] }}")).is_ok());
    assert!(matches!(plain(&nest(99999)), Err(TextError::TemplateFailed { .. })));
}

#[test]
fn long_expressions_do_not_overflow_the_stack() {
    let links = |link: &str| link.repeat(SOURCE_BYTES_MAX / link.len() - 20);
    for source in [
        format!("{{{{ 1{} }}}}", links("+1")),
        format!("{{{{ 'a'{} }}}}", links("|e")),
        format!("{{{{ x{} }}}}", links(".a")),
        format!("{{{{ {}1 }}}}", links("-")),
        format!("{{{{ {}1 }}}}", links("not ")),
        format!("{{{{ {}1 }}}}", links("1 if 1 else ")),
        format!("{{{{ {}1 }}}}", links("[")),
        links("{% if 1 %}"),
    ] {
        // These may be refused, fail or print something, but they must return.
        plain(&source).ok();
    }
    assert!(matches!(plain(&links("abc").repeat(2)), Err(TextError::TemplateSyntax { .. })));
}

#[test]
fn deep_values_are_refused_as_json() {
    let deep = "{% set ns = namespace(x=[]) %}{% for a in range(9999) %}{% set ns.x = [ns.x] %}\
                {% endfor %}{{ ns.x | tojson }}";
    assert!(matches!(plain(deep), Err(TextError::TemplateFailed { .. })));
}

#[test]
fn methods_of_strings() {
    let source = "{{ 'a-b-c'.rsplit('-', 1)|join('|') }} {{ 'a:b:c'.partition(':')|join('|') }} \
                  {{ 'a:b:c'.rpartition(':')|join('|') }} {{ 'abc'.removeprefix('a') }} \
                  {{ 'abc'.removesuffix('bc') }} {{ 'abc'.partition('x')|join('|') }}";
    assert_eq!(plain(source).unwrap(), "a-b|c a|:|b:c a:b|:|c bc a abc||");
    assert!(matches!(plain("{{ 'a'.partition('') }}"), Err(TextError::TemplateFailed { .. })));
    assert!(matches!(plain("{{ 'a'.nonesuch() }}"), Err(TextError::TemplateFailed { .. })));
}

#[test]
fn tests_as_in_python() {
    let source = "{{ none is iterable }} {{ x is iterable }} {{ [] is iterable }} {{ 'a' is iterable }} \
                  {{ 1 is iterable }} {{ {} is mapping }} {{ 'a' is string }} {{ true is number }}";
    assert_eq!(plain(source).unwrap(), "False True True True False True True True");
}

#[test]
fn clock_is_the_given_one() {
    let now = CivilTime::parse("2025-07-26T12:34:56");
    let input = RenderInput { now, ..RenderInput::default() };
    assert_eq!(render("{{ strftime_now('%d %b %Y') }}", &input).unwrap(), "26 Jul 2025");
}

#[test]
fn variables_are_those_that_a_caller_may_set() {
    let source = "{% macro m() %}{{ effort }}{% endmacro %}{% set ns = namespace(a=1) %}\
                  {% if not thinking is defined %}{% set thinking = false %}{% endif %}\
                  {% for m in messages %}{{ m.reasoning_content }}{% endfor %}{{ m() }}\
                  {{ bos_token }}{{ strftime_now('%Y') }}{{ raise_exception('x') }}{{ dict(a=1) }}";
    let template = ChatTemplate::from_source(source, "", "").unwrap();
    assert_eq!(template.variables().unwrap(), ["effort", "thinking"]);
}
