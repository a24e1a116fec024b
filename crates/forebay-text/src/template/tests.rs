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
                  {% set effort = effort | default('low') %}{% set tone = tone if tone is defined else 'dry' %}\
                  {% for m in messages %}{{ m.reasoning_content }}{% endfor %}{{ m() }}\
                  {{ bos_token }}{{ strftime_now('%Y') }}{{ raise_exception('x') }}{{ dict(a=1) }}";
    let template = ChatTemplate::from_source(source, "", "").unwrap();
    assert_eq!(template.variables().unwrap(), ["effort", "thinking", "tone"]);
}

#[test]
fn lists_change_as_in_python() {
    for (source, expected) in [
        // The change is seen outside of the loop, and by all names of the list.
        (
            "{% set xs = [] %}{% set ys = xs %}{% for i in range(3) %}{% do xs.append(i) %}{% endfor %}{{ ys }}",
            "[0, 1, 2]",
        ),
        (
            "{% set xs = [1] %}{% set _ = xs.append('é') %}{{ xs | tojson }}{{ xs | length }}{{ xs[-1] }}",
            "[1, \"é\"]2é",
        ),
        (
            "{% set xs = [] %}{{ xs.append(1) or '' }}{{ xs.append(2) is none }}{{ xs }}",
            "True[1, 2]",
        ),
        (
            "{% set ns = namespace(xs=['a']) %}{% if true %}{% do ns.xs.append('b') %}{% endif %}{{ ns.xs | join }}",
            "ab",
        ),
        (
            "{% set xs = [1, 2] %}{% do xs.extend([3, 4]) %}{% do xs.extend(xs) %}{{ xs | length }}{{ xs == [1, 2, 3, 4] * 2 }}",
            "8True",
        ),
        ("{% set xs = [1, 2, 3] %}{{ xs.pop() }}{{ xs.pop(0) }}{{ xs.pop(-1) }}{{ xs }}", "312[]"),
        (
            "{% set xs = [1] %}{% do xs.insert(0, 0) %}{% do xs.insert(9, 9) %}{% do xs.insert(-1, 8) %}{% do xs.insert(-9, 7) %}{{ xs }}",
            "[7, 0, 1, 8, 9]",
        ),
        // A queue of ids, as in templates of Kimi K2.
        (
            "{% set q = namespace(ids=[]) %}{% macro m(i) %}{% set _ = q.ids.append(i) %}{% endmacro %}{% for i in 'ab' %}{{ m(i) }}{% endfor %}\
             {% for i in range(3) %}{% if q.ids %}{% set id = q.ids.pop(0) %}{{ id }}{% else %}-{% endif %}{% endfor %}",
            "ab-",
        ),
        // Each evaluation makes a new list.
        (
            "{% for i in range(2) %}{% set xs = [] %}{% do xs.append(i) %}{{ xs }}{% endfor %}",
            "[0][1]",
        ),
        ("{% set xs = 'a b'.split() | list %}{% do xs.append('c') %}{{ xs | join('|') }}", "a|b|c"),
        // Lists in lists stay the same lists. What reads a list whenever it is used is copied.
        (
            "{% set a, b = [], [] %}{% do a.append(b) %}{% do a.append((b, {'k': b})) %}{% do b.append(1) %}{{ a }}",
            "[[1], ([1], {'k': [1]})]",
        ),
        (
            "{% set a = [1, 2, 3] %}{% do a.append(a[1:]) %}{% do a.append({'k': [a[:1]]}) %}{{ a }}",
            "[1, 2, 3, [2, 3], {'k': [[1]]}]",
        ),
        // Brackets that are no lists, and text that is no code.
        (
            "{% raw %}[x].append({% endraw %}{# [ #}{{ '[' }}{% set xs = [[1], [2]][0:1][0] %}{% do xs.append({'in': [3]}.in[0]) %}{{ xs[0] }}{{ xs }}",
            "[x].append([1[1, 3]",
        ),
        (
            "{% set xs = [1] %}{% do xs.append(2) %}{{ 1 in [1] and 3 not in [1] }}{{ 2 in xs }}{{ xs is sequence }}{{ [] or [5] }}",
            "TrueTrueTrue[5]",
        ),
    ] {
        let found = plain(source).unwrap_or_else(|error| panic!("{source}: {error}"));
        assert_eq!(found, expected, "{source}");
    }
    // Nothing is left from one prompt to the next, and no name of a variable is taken.
    let source = "{% set xs = [1] %}{% do xs.append(x) %}{{ xs }}";
    let template = ChatTemplate::from_source(source, "", "").unwrap();
    assert_eq!(template.variables().unwrap(), ["x"]);
    for _ in 0..2 {
        let mut input = RenderInput::default();
        input.variables.insert("x".to_owned(), json!(2));
        assert_eq!(template.render(&input).unwrap(), "[1, 2]");
    }
}

#[test]
fn lists_that_cannot_change_say_why() {
    let message = json!([{ "role": "user", "content": "a" }]);
    let input = RenderInput { messages: message, ..RenderInput::default() };
    for (source, why) in [
        ("{% do messages.append(1) %}", "append changes only lists that the template makes"),
        ("{% set xs = [1] + [2] %}{% do xs.append(1) %}", "append changes only lists"),
        ("{% set xs = [1] %}{% do xs.append() %}", "missing argument"),
        (
            "{% set xs = [1] %}\n{% do xs.pop(1) %}",
            "line 2: invalid operation: pop: the list has no such item",
        ),
        ("{% set xs = [] %}{% do xs.pop() %}", "no such item"),
        ("{% set xs = [] %}{% do xs.append(namespace()) %}", "cannot hold this value"),
        ("{% set xs = [] %}{% do xs.remove(1) %}", "no method named remove"),
    ] {
        let error = render(source, &input).unwrap_err().to_string();
        assert!(error.contains(why), "{source}: {error}");
    }
}

#[test]
fn no_list_holds_itself() {
    for work in [
        "{% do a.append(a) %}",
        "{% do a.insert(0, [[a]]) %}",
        "{% do a.extend([1, a]) %}",
        "{% do a.append({'k': (1, a)}) %}",
        "{% do a.append({(a,): 1}) %}",
        "{% set b = [] %}{% do a.append(b) %}{% do b.append(a) %}",
        "{% set b = [] %}{% set c = [b] %}{% do b.append(a) %}{% do a.append({'k': c}) %}",
        "{% set b = [] %}{% set c = [b + []] %}{% do b.append(a) %}{% do a.append(c) %}",
        "{% set b = [] %}{% set c = b + [1] %}{% do b.append(a) %}{% do a.append((c,)) %}",
        "{% set n = namespace(a=a) %}{% do a.append([n]) %}",
        "{% macro m() %}{{ a }}{% endmacro %}{% do a.append(m) %}",
        "{% for i in [1] %}{% do a.append(loop) %}{% endfor %}",
    ] {
        let source = format!("{{% set a = [1] %}}{work}{{{{ a }}}}{{{{ a == [a] }}}}");
        let error = plain(&source).err().unwrap_or_else(|| panic!("{work} is rendered"));
        assert!(error.to_string().contains("a list cannot hold"), "{work}: {error}");
    }
}

#[test]
fn changes_without_end_are_refused() {
    let forever = |work: &str| {
        format!(
            "{{% set a, b = [1], [] %}}{{% for i in range(99999) %}}{{% for j in range(9999) %}}{work}{{% endfor %}}{{% endfor %}}"
        )
    };
    for work in [
        "{% do a.append(j) %}",
        "{% do a.extend(a) %}",
        "{% do a.insert(0, j) %}",
        "{% do b.append((b[:], b[:])) %}",
        "{% set c = a | list %}{% do c.append(1) %}{% do a.append(c) %}",
        "{% do b.append([a, a]) %}{% do b.pop() %}",
    ] {
        let error = plain(&forever(work)).unwrap_err().to_string();
        assert!(error.contains("does not come to an end"), "{work}: {error}");
    }
}

#[test]
fn deep_lists_that_change_do_not_overflow_the_stack() {
    let nest = |times: usize| {
        format!(
            "{{% set ns = namespace(x=[]) %}}{{% for a in range({times}) %}}{{% set y = [] %}}{{% do y.extend([[[[ns.x]]]][:0]) %}}\
             {{% set ns.x = [[[[[[[[[[ns.x]]]]]]]]]] %}}{{% endfor %}}"
        )
    };
    let printed = plain(&(nest(4000) + "{{ ns.x }}")).unwrap();
    assert_eq!(printed.len(), 2 * 40_001);
    assert!(plain(&(nest(4000) + "{{ ns.x == [ns.x] }}")).is_ok());
    let error = plain(&(nest(4000) + "{% set z = [] %}{% do z.append(ns.x) %}")).unwrap_err();
    assert!(error.to_string().contains("too deep"), "{error}");
    // A list of one item is put into the next one, over and over.
    let chain = "{% set ns = namespace(x=[]) %}{% set first = ns.x %}{% for a in range(12000) %}{% set y = [] %}\
        {% do ns.x.append(y) %}{% set ns.x = y %}{% endfor %}{{ first }}";
    assert_eq!(plain(chain).unwrap().len(), 2 * 12_001);
}
