//! Workflows run what was reviewed: actions are named by commit, and only single jobs may write.

use super::Finding;
use super::files::Repository;

const FOLDER: &str = ".github/workflows/";

/// Checks the workflows.
pub fn check(repository: &Repository, findings: &mut Vec<Finding>) {
    for file in repository.files().iter().filter(|file| file.path.starts_with(FOLDER)) {
        findings.extend(of_workflow(&file.path, file.text.as_deref().unwrap_or_default()));
    }
}

fn of_workflow(path: &str, text: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (line, number) in text.lines().zip(1..) {
        let step = line.trim_start().trim_start_matches("- ");
        if let Some(action) = step.strip_prefix("uses:") {
            let action = action.split('#').next().unwrap_or_default().trim();
            let commit = action.rsplit_once('@').map_or("", |(_, commit)| commit);
            let is_commit =
                commit.len() == 40 && commit.bytes().all(|byte| byte.is_ascii_hexdigit());
            if !action.starts_with("./") && !is_commit {
                let why = "a tag can be moved: name the commit, and the version in a comment";
                findings.push(Finding::fail(path, number, format!("{action}: {why}")));
            }
        }
        // Permissions of the whole workflow are indented by two spaces, those of a job by more.
        if line.starts_with("  ")
            && !line.starts_with("   ")
            && line.trim_end().ends_with(": write")
        {
            findings.push(Finding::fail(path, number, "only the job that needs it may write"));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::of_workflow;

    #[test]
    fn tags_and_wide_permissions_are_found() {
        let commit = "a".repeat(40);
        let good = format!(
            "jobs:\n  a:\n    permissions:\n      contents: write\n    steps:\n      - uses: x/y@{commit} # v1\n"
        );
        assert_eq!(of_workflow("w.yml", &good), []);
        let bad = "permissions:\n  contents: write\njobs:\n  a:\n    steps:\n      - uses: x/y@v1\n      - name: z\n        uses: x/z@main\n";
        let lines: Vec<usize> = of_workflow("w.yml", bad).iter().map(|found| found.line).collect();
        assert_eq!(lines, [2, 6, 8]);
    }
}
