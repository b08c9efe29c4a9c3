//! Shell completions and manual pages, made from clap's definition of the command line. In this
//! file, `all` is that definition.

use super::settings::default_text;
use crate::ranks::launch::TOKEN_VARIABLE;
use anyhow::{Context, Result};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Command};
use clap_complete::{Generator, Shell};
use clap_mangen::Man;
use host::config;
use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;

const NAME: &str = "nccl-spark";
const FILES: &str = "\
.SH FILES
.TP
~/.nccl\\-spark.conf, /etc/nccl\\-spark.conf
Settings, one NAME=value a line; the first of the two that sets something wins, and the environment wins over both.
.TP
$XDG_RUNTIME_DIR/softverbs/, /dev/shm/softverbs\\-UID/
The software fabrics of a user that are running; the first of the two if the variable names a folder of the user.
";

/// The shells with completions, and the path of each file below PREFIX/share.
const SHELLS: [(Shell, &str); 3] = [
    (Shell::Bash, "bash-completion/completions/nccl-spark"),
    (Shell::Zsh, "zsh/site-functions/_nccl-spark"),
    (Shell::Fish, "fish/vendor_completions.d/nccl-spark.fish"),
];

/// Options of completions.
#[derive(Debug, Args)]
pub struct Completions {
    /// Shell to print completions for.
    #[arg(value_name = "SHELL", value_parser = PossibleValuesParser::new(SHELLS.map(|(shell, _)| shell.to_string())).try_map(|name| name.parse::<Shell>()))]
    shell: Shell,
}

/// Options of man.
#[derive(Debug, Args)]
pub struct Manual {
    /// Writes the pages of all commands into the folder DIR, in place of printing the main page.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

impl Completions {
    pub fn run(&self, all: &Command, mut out: impl Write) -> Result<()> {
        Ok(out.write_all(&completions(all, self.shell))?)
    }
}

impl Manual {
    pub fn run(self, all: &Command, mut out: impl Write) -> Result<()> {
        let pages = pages(all)?;
        let Some(folder) = self.out else {
            let (_, main) = pages.last().context("there is no page")?;
            return Ok(out.write_all(main)?);
        };
        fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
        for (name, text) in pages {
            let file = folder.join(name);
            fs::write(&file, text).with_context(|| format!("write {}", file.display()))?;
        }
        Ok(())
    }
}

fn completions(all: &Command, shell: Shell) -> Vec<u8> {
    let mut command = visible(all);
    let mut text = Vec::new();
    command.set_bin_name(NAME);
    command.build();
    shell.generate(&command, &mut text);
    if shell == Shell::Bash {
        // clap_complete 4.6.11 encodes the hyphen of the program's name in two ways. Without this
        // correction, bash finds no options.
        text = String::from_utf8_lossy(&text)
            .replace("nccl__subcmd__spark", "nccl__spark")
            .into_bytes();
    }
    text
}

/// Returns the completions for all shells and the manual pages: each file's path below the prefix,
/// and its content.
pub fn files(all: &Command) -> io::Result<Vec<(String, Vec<u8>)>> {
    let completions = SHELLS.map(|(shell, file)| (file.to_owned(), completions(all, shell)));
    let pages = pages(all)?
        .into_iter()
        .map(|(name, text)| (format!("man/man1/{name}"), text));
    Ok(completions
        .into_iter()
        .chain(pages)
        .map(|(path, text)| (format!("share/{path}"), text))
        .collect())
}

/// Returns the file name and the text of each manual page. The program's own page is the last.
fn pages(all: &Command) -> io::Result<Vec<(String, Vec<u8>)>> {
    let mut command = visible(all).disable_help_subcommand(true);
    let mut pages = Vec::new();
    command.build();
    add_pages(command, &mut pages)?;
    Ok(pages)
}

fn add_pages(command: Command, pages: &mut Vec<(String, Vec<u8>)>) -> io::Result<()> {
    for command in command
        .get_subcommands()
        .filter(|command| !command.is_hide_set())
        .cloned()
    {
        add_pages(command, pages)?;
    }
    let has_subcommands = command.has_subcommands();
    let is_main = command.get_name() == NAME;
    let after = command.get_after_help().map(ToString::to_string);
    let page = Man::new(command)
        .manual("nccl-spark")
        .source(concat!("nccl-spark ", env!("CARGO_PKG_VERSION")));
    let mut text = Vec::new();
    page.render_title(&mut text)?;
    page.render_name_section(&mut text)?;
    page.render_synopsis_section(&mut text)?;
    page.render_description_section(&mut text)?;
    page.render_options_section(&mut text)?;
    if has_subcommands {
        page.render_subcommands_section(&mut text)?;
    }
    text.extend(after.iter().flat_map(|after| sections(after).into_bytes()));
    if is_main {
        text.extend(format!("{}{FILES}", environment()).into_bytes());
    }
    pages.push((page.get_filename(), text));
    Ok(())
}

/// Converts the end of the help (examples, exit status) to roff, and keeps its line breaks.
fn sections(after_help: &str) -> String {
    let mut page = ".SH EXAMPLES\n.nf\n".to_owned();
    for line in after_help.lines().filter(|line| line.trim() != "Examples:") {
        match line {
            "Exit status:" => page += ".fi\n.SH EXIT STATUS\n.nf\n",
            line => page += &format!("\\&{}\n", escaped(line)),
        }
    }
    page + ".fi\n"
}

fn environment() -> String {
    let settings = config::table().iter().map(|row| {
        (
            row.name,
            format!("{} Default: {}.", row.doc, default_text(row)),
        )
    });
    let own = [
        (
            "NCCL_DEBUG",
            "WARN, INFO or TRACE: how much of the plugin's log is shown. -v and -vv do the same."
                .to_owned(),
        ),
        (
            "NO_COLOR",
            "Turns colours off, whatever its value.".to_owned(),
        ),
        (
            TOKEN_VARIABLE,
            "Secret of a run's ranks, the same on each: 32 hexadecimal digits.".to_owned(),
        ),
        (
            "SOFTVERBS_DIR",
            "The folder below which software fabrics keep their files.".to_owned(),
        ),
    ];
    let entry =
        |(name, text): (&str, String)| format!(".TP\n{}\n{}\n", escaped(name), escaped(&text));
    format!(
        ".SH ENVIRONMENT\n{}",
        settings.chain(own).map(entry).collect::<String>()
    )
}

fn escaped(line: &str) -> String {
    line.replace('\\', "\\e").replace('-', "\\-")
}

fn visible(all: &Command) -> Command {
    let mut command = Command::new(NAME).version(env!("PROGRAM_VERSION"));
    if let Some(about) = all.get_about() {
        command = command.about(about.clone());
    }
    if let Some(examples) = all.get_after_help() {
        command = command.after_help(examples.clone());
    }
    let subcommands = all
        .get_subcommands()
        .filter(|command| !command.is_hide_set())
        .cloned();
    command
        .subcommand_required(true)
        .args(all.get_arguments().cloned())
        .subcommands(subcommands)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::CommandFactory;

    #[test]
    fn completions_offer_commands_and_options_and_nothing_that_is_hidden() {
        for (shell, _) in SHELLS {
            let text = String::from_utf8(completions(&Cli::command(), shell)).unwrap();
            for word in [
                "all-gather",
                "uninstall",
                "minbytes",
                "spark-untuned",
                "quiet",
            ] {
                assert!(text.contains(word), "{shell:?}: {word}");
            }
            for word in [
                "communicators-rank",
                "nccl-tests-rank",
                "tune-collectives-write",
            ] {
                assert!(!text.contains(word), "{shell:?}: {word}");
            }
        }
    }

    #[test]
    fn bash_completes_commands_options_and_values() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), completions(&Cli::command(), Shell::Bash)).unwrap();
        let complete = |words: [&str; 4], cword: usize| {
            let words_text = words.join(" ");
            let current = words[cword];
            let before = words[cword - 1];
            let script = format!(
                "source {}; COMP_WORDS=({words_text}); COMP_CWORD={cword}; \
                 _nccl__spark nccl-spark \"{current}\" \"{before}\"; echo \"${{COMPREPLY[@]}}\"",
                file.path().display()
            );
            let output = std::process::Command::new("bash")
                .args(["-c", &script])
                .output()
                .unwrap();
            assert!(
                output.stderr.is_empty(),
                "{}",
                String::from_utf8_lossy(&output.stderr)
            );
            String::from_utf8(output.stdout).unwrap().trim().to_owned()
        };
        assert_eq!(complete(["nccl-spark", "all-g", "", ""], 1), "all-gather");
        assert_eq!(
            complete(["nccl-spark", "all-gather", "--minb", ""], 2),
            "--minbytes"
        );
        assert_eq!(
            complete(["nccl-spark", "all-gather", "--fabric", "so"], 3),
            "soft"
        );
        assert_eq!(
            complete(["nccl-spark", "all-gather", "--profile", "spark-2"], 3),
            "spark-2cable"
        );
        assert_eq!(
            complete(["nccl-spark", "fabric", "slow", "--fab"], 3),
            "--fabric-name"
        );
    }

    #[test]
    fn every_command_has_a_page_with_its_options_and_examples() {
        let pages = pages(&Cli::command()).unwrap();
        let names: Vec<&str> = pages.iter().map(|(name, _)| name.as_str()).collect();
        for name in [
            "nccl-spark.1",
            "nccl-spark-all-gather.1",
            "nccl-spark-tune-collectives.1",
            "nccl-spark-fabric-slow.1",
        ] {
            assert!(names.contains(&name), "{name}: {names:?}");
        }
        assert!(!names.iter().any(|name| name.contains("rank")), "{names:?}");
        assert_eq!(names.last(), Some(&"nccl-spark.1"));
        let text = |name: &str| {
            let page = pages.iter().find(|(found, _)| found == name).unwrap();
            String::from_utf8(page.1.clone()).unwrap()
        };
        let page = text("nccl-spark-all-gather.1");
        assert!(
            page.contains("\\-\\-minbytes") && page.contains(".SH EXAMPLES\n.nf\n"),
            "{page}"
        );
        assert!(page.contains("\\&  nccl\\-spark all\\-gather"), "{page}");
        let main = text("nccl-spark.1");
        for part in [
            ".SH EXIT STATUS\n.nf\n\\&  0 ",
            ".SH ENVIRONMENT\n.TP\n",
            "\nNCCL_SPARK_TUNER\n",
            ".SH FILES\n.TP\n",
        ] {
            assert!(
                main.contains(part) && !page.contains(part),
                "{part}: {main}"
            );
        }
        // A page has no date, so that it is the same in every build.
        assert!(!page.contains("202"), "{page}");
    }
}
