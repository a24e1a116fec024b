//! The recorder of `--trace-io` for the session, and the file that is written at the end.

use std::path::Path;

use anyhow::Context as _;
use forebay_engine::{Session, SessionOptions, TracedModel};
use forebay_format::FileIndex;
use forebay_lab::trace_io::{self, FileEntry, Trace, TraceHeader};
use forebay_store::{IoRecorder, OutputStream, Outputs, Recording};

use crate::args::TracingArgs;
use crate::failure::Outcome;
use crate::output;
use crate::outputs;
use crate::size;

/// The file for the trace and the recorder, if a trace was asked for.
pub struct TracingFile(Option<(OutputStream, IoRecorder)>);

impl TracingFile {
    /// Creates the file before the work starts, and makes the session record its reads.
    pub fn start(
        args: &TracingArgs,
        outputs: &mut Outputs,
        options: &mut SessionOptions,
    ) -> Outcome<TracingFile> {
        let tracing = TracingFile::create(args.trace_io.as_deref(), outputs)?;
        options.recorder = tracing.recorder().cloned();
        Ok(tracing)
    }

    /// Creates the file. The caller decides what is recorded.
    pub fn create(path: Option<&Path>, outputs: &mut Outputs) -> Outcome<TracingFile> {
        let Some(path) = path else { return Ok(TracingFile(None)) };
        outputs::not_standard("--trace-io", path, "the result of the command")?;
        let file = outputs::create(outputs, path)?.into_stream();
        Ok(TracingFile(Some((file, IoRecorder::new(IoRecorder::DEFAULT_CAPACITY)))))
    }

    /// Returns the recorder for [`forebay_store::FileSet::recorded`].
    pub fn recorder(&self) -> Option<&IoRecorder> {
        self.0.as_ref().map(|(_, recorder)| recorder)
    }

    /// Closes the session, so that no read is missing, and writes the file.
    pub fn finish(self, session: Session, command: &str) -> Outcome {
        let traced = session.traced_model().cloned();
        let kv_folder = session.kv_folder().map(Path::to_owned);
        drop(session);
        match traced {
            Some(traced) => self.write(&traced, command, kv_folder.as_deref()),
            None => Ok(()),
        }
    }

    /// Writes the file. The caller must have closed the engine, and the folder of keys and values.
    pub fn write(self, traced: &TracedModel, command: &str, kv_folder: Option<&Path>) -> Outcome {
        let Some((mut file, recorder)) = self.0 else { return Ok(()) };
        let mut header = TraceHeader { command: command.to_owned(), ..TraceHeader::new(traced) };
        let mut recording = recorder.take();
        // The folder of keys and values counts as one more file.
        if let Some(bytes) = recording.place_kv(FileIndex(header.files.len() as u32)) {
            let path =
                kv_folder.map_or("keys and values".into(), |folder| folder.display().to_string());
            header.files.push(FileEntry { path, bytes });
        }
        let trace = Trace { header, recording };
        let path = file.path().to_path_buf();
        let failed = || format!("{}: the trace cannot be written", path.display());
        trace_io::write(&mut file, &trace).with_context(failed)?;
        file.commit()?;
        let Recording { reads, dropped_reads, dropped_bytes, .. } = &trace.recording;
        output::tell!(
            "{}: a trace of {} reads and writes",
            path.display(),
            output::grouped(reads.len() as u64)
        );
        if *dropped_reads > 0 {
            output::tell!(
                "warning: the recorder was full: {} reads of {} are not in the trace",
                output::grouped(*dropped_reads),
                size::format(*dropped_bytes)
            );
        }
        Ok(())
    }
}
