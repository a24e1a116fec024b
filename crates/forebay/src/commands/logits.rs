//! `forebay logits` writes the logits of given tokens to a safetensors file, for conformance tests.

use std::io::{self, Write};
use std::time::Instant;

use forebay_engine::SessionStatistics;
use forebay_stream::MemoryPlan;
use serde::Serialize;
use serde_json::{Map, json};

use crate::args::LogitsArgs;
use crate::config;
use crate::failure::Outcome;
use crate::open;
use crate::output;
use crate::outputs;
use crate::size;
use crate::tracing_file::TracingFile;

#[derive(Serialize)]
struct Document<'a> {
    output: &'a std::path::Path,
    tokens: usize,
    vocabulary: usize,
    bytes: u64,
    compute_seconds: f64,
    plan: Option<&'a MemoryPlan>,
    statistics: SessionStatistics,
}

pub fn run(args: LogitsArgs) -> Outcome {
    let ids = config::token_ids(&args.tokens)?;
    let mut options = config::session(&args.budget)?;
    options.mtp = args.mtp;
    let context_for = if options.context.is_some() { "--ctx" } else { "--tokens" };
    options.context.get_or_insert(ids.len());
    if args.json {
        outputs::not_standard("-o", &args.output, "the JSON document")?;
    }
    let mut outputs = outputs::begin(args.tracing.force, true)?;
    outputs::protect_model(&mut outputs, &args.model);
    if let Some(list) = args.tokens.strip_prefix('@') {
        outputs.protect(list.as_ref());
    }
    let mut file = outputs::create(&mut outputs, &args.output)?.into_stream();
    let tracing = TracingFile::start(&args.tracing, &mut outputs, &mut options)?;
    let mut session = open::session(&args.model, &options, context_for)?;

    let started = Instant::now();
    let mut routing = Vec::new();
    let experts = args.routing.then_some(&mut routing);
    let (logits, predicted) = match args.mtp {
        true => session.logits_and_predictions(&ids, experts)?,
        false => (session.logits(&ids, experts)?, Vec::new()),
    };
    let compute_seconds = started.elapsed().as_secs_f64();

    let shape = || vec![ids.len(), session.vocab_size()];
    let mut tensors = vec![Tensor { name: "logits", shape: shape(), data: Data::F32(&logits) }];
    if args.mtp {
        tensors.push(Tensor { name: "mtp_logits", shape: shape(), data: Data::F32(&predicted) });
    }
    if args.routing {
        let experts = session.info().experts_per_token;
        // A dense model chooses no experts, so its routing is an empty tensor.
        let layers = routing.len().checked_div(ids.len() * experts).unwrap_or(0);
        tensors.push(Tensor {
            name: "routing",
            shape: vec![ids.len(), layers, experts],
            data: Data::I32(&routing),
        });
    }
    let bytes = write(&mut file, &tensors)?;
    file.commit()?;
    if args.json {
        output::json(&Document {
            output: &args.output,
            tokens: ids.len(),
            vocabulary: session.vocab_size(),
            bytes,
            compute_seconds,
            plan: session.plan(),
            statistics: session.statistics(),
        })?;
        return tracing.finish(session, "logits");
    }
    output::tell!(
        "{}: logits of {} tokens, {}",
        outputs::shown(&args.output),
        ids.len(),
        size::format(bytes)
    );
    tracing.finish(session, "logits")
}

struct Tensor<'a> {
    name: &'static str,
    shape: Vec<usize>,
    data: Data<'a>,
}

enum Data<'a> {
    F32(&'a [f32]),
    I32(&'a [i32]),
}

impl Data<'_> {
    fn bytes(&self) -> u64 {
        let elements = match self {
            Data::F32(values) => values.len(),
            Data::I32(values) => values.len(),
        };
        elements as u64 * 4
    }
}

/// Writes a safetensors file: length of the header, header, data without gaps. The file depends only on the tensors, so
/// equal results give equal files.
fn write(out: &mut impl Write, tensors: &[Tensor<'_>]) -> io::Result<u64> {
    let mut header = Map::new();
    let mut end = 0;
    for tensor in tensors {
        let start = end;
        end += tensor.data.bytes();
        let dtype = match tensor.data {
            Data::F32(_) => "F32",
            Data::I32(_) => "I32",
        };
        let entry = json!({ "dtype": dtype, "shape": tensor.shape, "data_offsets": [start, end] });
        header.insert(tensor.name.into(), entry);
    }
    let mut header = serde_json::Value::Object(header).to_string().into_bytes();
    // Spaces make the data begin at a multiple of eight.
    header.resize(header.len().next_multiple_of(8), b' ');
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(&header)?;
    for tensor in tensors {
        match tensor.data {
            Data::F32(values) => values.iter().try_for_each(|v| out.write_all(&v.to_le_bytes()))?,
            Data::I32(values) => values.iter().try_for_each(|v| out.write_all(&v.to_le_bytes()))?,
        }
    }
    Ok(8 + header.len() as u64 + end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_readers_understand_the_file() {
        let tensors = [
            Tensor { name: "logits", shape: vec![1, 3], data: Data::F32(&[1.0, -2.5, 0.0]) },
            Tensor { name: "routing", shape: vec![1, 1, 2], data: Data::I32(&[3, 7]) },
        ];
        let mut file = Vec::new();
        let bytes = write(&mut file, &tensors).unwrap();
        assert_eq!(bytes, file.len() as u64);
        let read = safetensors::SafeTensors::deserialize(&file).unwrap();
        let logits = read.tensor("logits").unwrap();
        assert_eq!(logits.shape(), [1, 3]);
        assert_eq!(logits.dtype(), safetensors::Dtype::F32);
        assert_eq!(logits.data()[4..8], (-2.5f32).to_le_bytes());
        let routing = read.tensor("routing").unwrap();
        assert_eq!((routing.shape(), routing.dtype()), (&[1, 1, 2][..], safetensors::Dtype::I32));
        assert_eq!(routing.data(), [3, 0, 0, 0, 7, 0, 0, 0]);
    }
}
