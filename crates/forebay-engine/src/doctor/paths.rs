//! Lists which ways of reading work on this machine, and why others do not.

use serde::Serialize;

use super::disk::DiskReport;
use super::gpu::GpuReport;

/// One way of reading.
#[derive(Debug, Clone, Serialize)]
pub struct IoPath {
    pub name: &'static str,
    pub works: bool,
    /// How it works, or the reason why it does not.
    pub about: String,
}

pub(super) fn list(disk: &DiskReport, gpu: &GpuReport) -> Vec<IoPath> {
    let uring = disk.cases.iter().find(|case| case.engine == "uring");
    let registered = uring.is_some_and(|case| case.registered_buffers);
    let remark = |word: &str| disk.remarks.iter().find(|remark| remark.contains(word)).cloned();
    let pages = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    let pages = pages.unwrap_or_default();
    let huge = pages.contains("[always]") || pages.contains("[madvise]");
    let limit = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let limit = limit.lines().find(|line| line.starts_with("Max locked memory"));
    let limit = limit.and_then(|line| line.split_whitespace().nth(3)).unwrap_or("unknown");
    let path = |name, works, good: String, bad: Option<String>| IoPath {
        name,
        works,
        about: if works { good } else { bad.unwrap_or_else(|| "not on this kernel".to_owned()) },
    };
    let aligned = format!("offsets and memory aligned to {} bytes", disk.alignment);
    let method = disk.page_cache_method;
    let told = matches!(method, forebay_store::CacheMethod::Cachestat);
    vec![
        path("io_uring", uring.is_some(), "deep queues".to_owned(), remark("io_uring")),
        path(
            "registered memory",
            registered,
            format!("the limit on locked memory is {limit}"),
            remark("registered").or_else(|| remark("io_uring")),
        ),
        path("direct reads", disk.direct, aligned, remark("page cache")),
        path(
            "huge pages",
            huge,
            "2 MiB pages for memory that asks for them".to_owned(),
            Some("the kernel gives none: transparent_hugepage is set to never".to_owned()),
        ),
        path(
            "page cache state",
            told,
            "cachestat".to_owned(),
            Some(format!("no cachestat here: {method:?} is used instead").to_lowercase()),
        ),
        cufile(gpu),
    ]
}

fn cufile(gpu: &GpuReport) -> IoPath {
    let measured = gpu.first.as_ref().and_then(|gpu| gpu.cufile.as_ref());
    let about = match measured {
        Some(rates) => rates.mode.clone(),
        None => gpu.why_not_cufile.clone(),
    };
    IoPath { name: "cuFile", works: measured.is_some(), about }
}
