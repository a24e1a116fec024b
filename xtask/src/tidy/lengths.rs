//! Reports long files, which often hold a second subject. Clippy limits functions (`clippy.toml`).

use super::allow::AllowList;
use super::scan::RustSource;
use super::{Finding, Level};

const FILE_LINES_REPORTED: usize = 500;
const FILE_LINES_FAIL: usize = 700;

pub fn check(source: &RustSource, allow: &mut AllowList, findings: &mut Vec<Finding>) {
    let lines = source.text.lines().count();
    if lines > FILE_LINES_REPORTED {
        let allowed = lines > FILE_LINES_FAIL && allow.permits("file-length", &source.path);
        let fails = lines > FILE_LINES_FAIL && !allowed;
        let level = if fails { Level::Fail } else { Level::Report };
        let message = format!("{lines} lines: is there a second subject in this file?");
        findings.push(Finding { level, path: source.path.clone(), line: 0, message });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_files_fail() {
        let level = |lines: usize| {
            let source = RustSource::new("a.rs", &"// x\n".repeat(lines));
            let mut findings = Vec::new();
            check(&source, &mut AllowList::default(), &mut findings);
            findings.first().map(|finding| finding.level)
        };
        assert_eq!(level(701), Some(Level::Fail));
        assert_eq!(level(501), Some(Level::Report));
        assert_eq!(level(500), None);
    }
}
