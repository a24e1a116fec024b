//! Short templates of the latest families, in the form of published ones.

pub const SEED: &str = "\
{% for m in messages %}<seed:bos>{{ m.role }}{% if m.role == 'assistant' %}{% if m.reasoning_content %}{{ '\\n<seed:think>' + m.reasoning_content + '</seed:think>' }}{% endif %}\
{% if m.content %}{{ '\\n' + m.content + ('\\n' if m.tool_calls else '') }}{% endif %}{% for c in m.tool_calls or [] %}{{ '\\n<seed:tool_call>\\n<function=' + c.function.name + '>\\n' }}\
{% for k, v in c.function.arguments | items %}<parameter={{ k }}>{{ v }}</parameter>{{ '\\n' }}{% endfor %}{{ '</function>\\n</seed:tool_call>' }}{% endfor %}\
{% else %}{{ '\\n' + m.content }}{% if m.role == 'system' and tools %}{{ tools | tojson }}{% endif %}{% endif %}<seed:eos>{% endfor %}\
{% if add_generation_prompt %}<seed:bos>assistant{{ '\\n' }}{% if thinking_budget is defined and thinking_budget == 0 %}{{ '<seed:think>\\n</seed:think>' }}{% endif %}{% endif %}";

/// Hy3 makes its marks of pieces.
pub const HY3: &str = "\
{% set s = ':opensource' %}{% set effort = reasoning_effort if reasoning_effort is defined else 'no_think' %}{% macro mark(n) %}{{ '<' + n + s + '>' }}{% endmacro %}\
<｜hy_begin_of_sentence{{ s }}｜>{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}\
{% elif m.role == 'user' %}<｜hy_User{{ s }}｜>{{ m.content }}\
{% elif m.role == 'tool' %}{{ mark('tool_responses') + '\\n' if loop.previtem.role != 'tool' }}{{ mark('tool_response') + '\\n' + m.content + '\\n' + mark('/tool_response') + '\\n' }}\
{{ mark('/tool_responses') if loop.last or loop.nextitem.role != 'tool' }}\
{% else %}<｜hy_Assistant{{ s }}｜>{{ mark('think') }}{{ m.reasoning_content or '' }}{{ mark('/think') }}{{ m.content }}{% if m.tool_calls %}{{ mark('tool_calls') + '\\n' }}\
{% for c in m.tool_calls %}{{ mark('tool_call') + c.function.name + mark('tool_sep') + '\\n' }}{% for k, v in c.function.arguments.items() %}\
{{ mark('arg_key') + k + mark('/arg_key') + '\\n' + mark('arg_value') }}{{ v if v is string else v | tojson }}{{ mark('/arg_value') + '\\n' }}{% endfor %}{{ mark('/tool_call') + '\\n' }}{% endfor %}\
{{ mark('/tool_calls') }}{% endif %}<｜hy_eos{{ s }}｜>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<｜hy_Assistant{{ s }}｜>{{ mark('think') }}{{ mark('/think') if effort == 'no_think' }}{% endif %}";

/// Hy4 has another suffix, no mark behind the name, and no line ends.
pub const HY4: &str = "\
{% set s = ':6124c78e' %}{% macro mark(n) %}{{ '<' + n + s + '>' }}{% endmacro %}\
{% for m in messages %}<｜{{ m.role }}｜>{% if m.role == 'assistant' %}{{ mark('think') }}{{ m.reasoning_content or '' }}{{ mark('/think') }}{{ m.content }}{% if m.tool_calls %}{{ mark('tool_calls') }}\
{% for c in m.tool_calls %}{{ mark('tool_call') + c.function.name }}{% for k, v in c.function.arguments.items() %}{{ mark('arg_key') + k + mark('/arg_key') + mark('arg_value') }}\
{{ v if v is string else v | tojson }}{{ mark('/arg_value') }}{% endfor %}{{ mark('/tool_call') }}{% endfor %}{{ mark('/tool_calls') }}{% endif %}\
{% else %}{{ m.content }}{% if m.role == 'system' and tools %}{{ tools | tojson }}{% endif %}{% endif %}{% endfor %}\
{% if add_generation_prompt %}<｜assistant｜>{{ mark('think') }}{% if reasoning_effort == 'no_think' %}{{ mark('/think') }}{% endif %}{% endif %}";

pub const COHERE: &str = "\
{% set reasoning = reasoning if reasoning is defined else true %}{% macro turn(role) %}<|START_OF_TURN_TOKEN|><|{{ role }}_TOKEN|>{% endmacro %}\
{% macro number(id) %}{% for m in messages %}{% for c in m.tool_calls or [] %}{{ loop.index0 if c.id == id }}{% endfor %}{% endfor %}{% endmacro %}\
{% for m in messages %}{% if m.role == 'assistant' %}{{ turn('CHATBOT') }}{% if m.reasoning_content %}<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|>{% endif %}\
{% if m.tool_calls %}<|START_ACTION|>[{% for c in m.tool_calls %}{{ '\\n    {\"tool_call_id\": \"' }}{{ loop.index0 }}\", \"tool_name\": \"{{ c.function.name }}\", \"parameters\": {{ c.function.arguments | tojson }}}\
{{ ',' if not loop.last }}{% endfor %}{{ '\\n]' }}<|END_ACTION|>{% else %}<|START_TEXT|>{{ m.content }}<|END_TEXT|>{% endif %}<|END_OF_TURN_TOKEN|>\
{% elif m.role == 'tool' %}{{ turn('SYSTEM') + '<|START_TOOL_RESULT|>[' if loop.previtem.role != 'tool' else ',' }}\
{{ '\\n    {\\n        \"tool_call_id\": \"' + number(m.tool_call_id) + '\",\\n        \"results\": {\\n            \"0\": ' }}{{ {'content': m.content} | tojson }}\
{{ '\\n        },\\n        \"is_error\": null\\n    }' }}{{ '\\n]<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>' if loop.last or loop.nextitem.role != 'tool' }}\
{% else %}{{ turn(m.role | upper) }}<|START_TEXT|>{{ m.content }}{% if m.role == 'system' and tools %}{{ tools | tojson }}{% endif %}<|END_TEXT|><|END_OF_TURN_TOKEN|>{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ turn('CHATBOT') }}<|START_THINKING|>{% if not reasoning %}<|END_THINKING|>{% endif %}{% endif %}";

/// Kimi K3 takes arguments as JSON, too, but then writes them in one element.
pub const KIMI_3: &str = "\
{% set thinking = thinking if thinking is defined else true %}{% macro open(tag) %}<|open|>{{ tag }}<|sep|>{% endmacro %}{% macro end(tag) %}<|close|>{{ tag }}<|sep|>{% endmacro %}\
{% macro of(id) %}{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id == id %}tool=\"{{ c.function.name }}\" index=\"{{ loop.index }}\"{% endif %}{% endfor %}{% endfor %}{% endmacro %}\
{% for m in messages %}{% if m.role == 'tool' %}<|open|>message role=\"tool\" {{ of(m.tool_call_id) }}<|sep|>{% else %}<|open|>message role=\"{{ m.role }}\"<|sep|>{% endif %}\
{% if m.role == 'assistant' %}{% if thinking %}{{ open('think') }}{{ m.reasoning_content or '' }}{{ end('think') }}{% endif %}{{ open('response') }}{{ m.content }}{{ end('response') }}\
{% if m.tool_calls %}{{ open('tools') }}{% for c in m.tool_calls %}<|open|>call tool=\"{{ c.function.name }}\" index=\"{{ loop.index }}\"<|sep|>{% if c.function.arguments is mapping %}\
{% for k, v in c.function.arguments.items() %}<|open|>argument key=\"{{ k }}\" type=\"{{ 'string' if v is string else ('boolean' if v is boolean else ('number' if v is number else 'object')) }}\"<|sep|>\
{{ v if v is string else v | tojson }}{{ end('argument') }}{% endfor %}{% else %}<|open|>json type=\"object\"<|sep|>{{ c.function.arguments }}{{ end('json') }}{% endif %}{{ end('call') }}{% endfor %}{{ end('tools') }}{% endif %}\
{% else %}{{ m.content }}{% if m.role == 'system' and tools %}{{ tools | tojson }}{% endif %}{% endif %}{{ end('message') }}<|end_of_msg|>{% endfor %}\
{% if thinking_effort == 'max' %}{% endif %}{% if add_generation_prompt %}<|open|>message role=\"assistant\"<|sep|>{{ open('think' if thinking else 'response') }}{% endif %}";

pub const SOLAR: &str = "\
{% macro name_of(id) %}{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name if c.id == id }}{% endfor %}{% endfor %}{% endmacro %}\
{% for m in messages %}{% if m.role == 'tool' %}{{ '<|begin|>tool<|tool_response|>' if loop.previtem.role != 'tool' }}<|tool_response:begin|>{{ m.tool_call_id }}<|tool_response:name|>\
{{ name_of(m.tool_call_id) }}<|tool_response:result|>{{ m.content }}<|tool_response:end|>{{ '<|end|>' if loop.last or loop.nextitem.role != 'tool' }}\
{% elif m.role == 'assistant' %}{% if m.reasoning %}<|begin|>assistant<|think|>{{ m.reasoning }}<|end|>{% endif %}{% if m.tool_calls %}<|begin|>assistant<|tool_calls|>\
{% for c in m.tool_calls %}<|tool_call:begin|>{{ c.id }}<|tool_call:name|>{{ c.function.name }}<|tool_call:args|>{{ c.function.arguments | tojson if c.function.arguments is mapping else c.function.arguments }}\
<|tool_call:end|>{% endfor %}<|calls|>{% else %}<|begin|>assistant<|content|>{{ m.content }}<|end|>{% endif %}\
{% else %}<|begin|>{{ m.role }}<|content|>{{ m.content }}{% if m.role == 'system' and tools %}{{ tools | tojson }}{% endif %}<|end|>{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|begin|>assistant<|think|><|end|>' if reasoning_effort == 'low' }}<|begin|>assistant{% endif %}";

pub const MUSE: &str = "\
{% macro name_of(id) %}{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name if c.id == id }}{% endfor %}{% endfor %}{% endmacro %}\
{% for m in messages %}{% if m.role == 'assistant' %}{% if m.reasoning_content %}<|start|>assistant to=self<|message|>{{ m.reasoning_content }}<|eom|>{% endif %}\
{% for c in m.tool_calls or [] %}<|start|>assistant to={{ c.function.name }}<|message|>{{ '<atem:function_calls>\\n<atem:invoke name=\"' + c.function.name + '\">\\n' }}\
{% for k, v in c.function.arguments.items() %}<atem:parameter name=\"{{ k }}\">{{ v }}{{ '</atem:parameter>\\n' }}{% endfor %}{{ '</atem:invoke>\\n</atem:function_calls>' }}\
{{ '<|eot|>' if loop.last else '<|eom|>' }}{% endfor %}{% if not m.tool_calls %}<|start|>assistant to=user<|message|>{{ m.content }}<|eot|>{% endif %}\
{% elif m.role == 'tool' %}<|start|>tool {{ name_of(m.tool_call_id) }}<|message|><tool_output name=\"{{ name_of(m.tool_call_id) }}\">{{ '\\n' + m.content + '\\n</tool_output>' }}<|eot|>\
{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}{% if m.role == 'system' %}{{ 'Reasoning strength: ' + (reasoning_strength or 'high') }}{% if tools %}{{ tools | tojson }}{% endif %}{% endif %}<|eot|>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|start|>assistant{% endif %}";

pub const LAGUNA: &str = "\
{% set enable_thinking = enable_thinking | default(true) %}〈|EOS|〉{% for m in messages %}{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>\
{% elif m.role == 'assistant' %}<assistant><think>{{ m.reasoning_content or '' }}</think>{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}\
{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}</tool_call>{% endfor %}</assistant>\
{% else %}<{{ m.role }}>{{ m.content }}{% if m.role == 'system' and tools %}{{ tools | tojson }}{% endif %}</{{ m.role }}>{% endif %}{{ '\\n' }}{% endfor %}\
{% if add_generation_prompt %}<assistant>{{ '<think>' if enable_thinking else '</think>' }}{% endif %}";

pub const LING_3: &str = "\
{% set option = 'off' if enable_thinking is defined and not enable_thinking else 'on' %}{% for m in messages %}\
{% if m.role == 'tool' %}{{ '<role>OBSERVATION</role>' if loop.previtem.role != 'tool' }}{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}{{ '<|role_end|>' if loop.last or loop.nextitem.role != 'tool' }}\
{% elif m.role == 'assistant' %}<role>ASSISTANT</role>{{ '\\n' }}<think>{{ m.reasoning_content or '' }}</think>{{ m.content }}{% for c in m.tool_calls or [] %}{{ '\\n' if m.content or not loop.first }}\
{{ '<tool_call>' + c.function.name + '\\n' }}{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>{{ '\\n' }}<arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}\
{{ '\\n</tool_call>' }}{% endfor %}<|role_end|>{% else %}<role>{{ 'HUMAN' if m.role == 'user' else 'SYSTEM' }}</role>{{ m.content }}\
{% if m.role == 'system' %}{% if tools %}{{ tools | tojson }}{% endif %}{{ 'detailed thinking ' + option }}{% endif %}<|role_end|>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<role>ASSISTANT</role>{{ '\\n<think>' if option == 'on' else '\\n<think></think>' }}{% endif %}";

pub const STEP_35: &str = "\
{% for m in messages %}{% if m.role == 'tool' %}{{ '<|im_start|>tool_response\\n' if loop.previtem.role != 'tool' }}<tool_response>{{ m.content }}</tool_response>\
{{ '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}{% else %}<|im_start|>{{ m.role + '\\n' }}{% if m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n' }}{% endif %}{{ m.content }}\
{% if m.role == 'system' and tools %}{{ tools | tojson }}{% endif %}{% for c in m.tool_calls or [] %}{{ '<tool_call>\\n<function=' + c.function.name + '>\\n' }}\
{% for k, v in c.function.arguments | items %}{{ '<parameter=' + k + '>\\n' }}{{ v }}{{ '\\n</parameter>\\n' }}{% endfor %}{{ '</function>\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}";

pub const EXAONE_4: &str = "\
{% for m in messages %}{% if m.role == 'tool' %}{{ '[|tool|]\\n' if loop.previtem.role != 'tool' }}<tool_result>{\"result\": {{ m.content | tojson }}}</tool_result>\
{{ '[|endofturn|]\\n' if loop.last or loop.nextitem.role != 'tool' else '\\n' }}{% else %}[|{{ m.role }}|]{{ '\\n' }}{% if m.role == 'assistant' %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{{ m.content }}\
{% if m.role == 'system' and tools %}{{ tools | tojson }}{% endif %}{% for c in m.tool_calls or [] %}{{ '\\n' if m.content or not loop.first }}<tool_call>{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}}</tool_call>\
{% endfor %}{{ '[|endofturn|]\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '[|assistant|]\\n' }}{{ '<think>\\n' if enable_thinking is defined and enable_thinking else '<think>\\n\\n</think>\\n\\n' }}{% endif %}";

/// Jamba writes its list of calls in pieces.
pub const JAMBA: &str = "\
{% for m in messages %}{% if m.role == 'tool' %}<|bom|><|tool|> {{ m.content }}<|eom|>{% else %}<|bom|><|{{ m.role }}|> {{ m.content }}{% if m.role == 'system' and tools %}<tool_definitions>{{ tools | tojson }}</tool_definitions>{% endif %}\
{% if m.tool_calls %}{{ '<tool_calls>' + '[' }}{% for c in m.tool_calls %}{{ '\\n    ' }}{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}}{{ ',' if not loop.last }}{% endfor %}{{ '\\n]</tool_calls>' }}{% endif %}<|eom|>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|bom|><|assistant|>{% endif %}";
