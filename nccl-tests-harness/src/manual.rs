//! Shell completions and manual pages, made from the command line's own definitions.

use crate::cli::Cli;
use anyhow::{Context, Result};
use clap::{Args, Command, CommandFactory, ValueEnum};
use clap_complete::Generator;
use clap_complete::shells::{Bash, Fish, Zsh};
use clap_mangen::Man;
use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;

const NAME: &str = "nccl-spark";

/// Options of completions.
#[derive(Debug, Args)]
pub struct Completions {
    /// Shell to print completions for.
    #[arg(value_name = "SHELL", value_enum)]
    shell: Shell,
}

/// Options of man.
#[derive(Debug, Args)]
pub struct Manual {
    /// Writes the pages of all commands into the folder DIR, in place of printing the main page.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// A shell with completions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Shell {
    /// Bash.
    Bash,
    /// Zsh.
    Zsh,
    /// Fish.
    Fish,
}

impl Completions {
    /// Prints them.
    ///
    /// # Errors
    /// When `out` cannot be written.
    pub fn run(&self, mut out: impl Write) -> Result<()> {
        Ok(out.write_all(&completions(self.shell))?)
    }
}

impl Manual {
    /// Prints the main page, or writes all.
    ///
    /// # Errors
    /// When they cannot be written.
    pub fn run(self, mut out: impl Write) -> Result<()> {
        let pages = pages()?;
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

impl Shell {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Bash, Self::Zsh, Self::Fish];

    /// Where the shell looks for them, below PREFIX/share.
    pub fn file(self) -> &'static str {
        match self {
            Self::Bash => "bash-completion/completions/nccl-spark",
            Self::Zsh => "zsh/site-functions/_nccl-spark",
            Self::Fish => "fish/vendor_completions.d/nccl-spark.fish",
        }
    }
}

/// The completions of one shell.
pub fn completions(shell: Shell) -> Vec<u8> {
    let (mut command, mut text) = (visible(), Vec::new());
    command.set_bin_name(NAME);
    command.build();
    match shell {
        Shell::Bash => {
            Bash.generate(&command, &mut text);
            // clap_complete 4.6.11 writes the hyphen of the program's name in two ways: the options of no command were found.
            return String::from_utf8_lossy(&text).replace("nccl__subcmd__spark", "nccl__spark").into_bytes();
        }
        Shell::Zsh => Zsh.generate(&command, &mut text),
        Shell::Fish => Fish.generate(&command, &mut text),
    }
    text
}

/// The manual pages: the file's name and the text of each, the program's own page last.
///
/// # Errors
/// When one cannot be written.
pub fn pages() -> io::Result<Vec<(String, Vec<u8>)>> {
    let (mut command, mut pages) = (visible().disable_help_subcommand(true), Vec::new());
    command.build();
    add_pages(command, &mut pages)?;
    Ok(pages)
}

fn add_pages(command: Command, pages: &mut Vec<(String, Vec<u8>)>) -> io::Result<()> {
    for command in command.get_subcommands().filter(|command| !command.is_hide_set()).cloned() {
        add_pages(command, pages)?;
    }
    let has_subcommands = command.has_subcommands();
    let examples = command.get_after_help().map(ToString::to_string);
    let page = Man::new(command).manual("nccl-spark").source(concat!("nccl-spark ", env!("CARGO_PKG_VERSION")));
    let mut text = Vec::new();
    page.render_title(&mut text)?;
    page.render_name_section(&mut text)?;
    page.render_synopsis_section(&mut text)?;
    page.render_description_section(&mut text)?;
    page.render_options_section(&mut text)?;
    if has_subcommands {
        page.render_subcommands_section(&mut text)?;
    }
    if let Some(examples) = examples {
        text.extend(example_section(&examples).into_bytes());
    }
    pages.push((page.get_filename(), text));
    Ok(())
}

/// The examples as they are in the help: lines that are not filled.
fn example_section(examples: &str) -> String {
    let lines = examples.lines().filter(|line| line.trim() != "Examples:");
    let line = |line: &str| format!("\\&{}\n", line.replace('\\', "\\e").replace('-', "\\-"));
    format!(".SH EXAMPLES\n.nf\n{}.fi\n", lines.map(line).collect::<String>())
}

/// The command line without the commands that the program uses for itself.
fn visible() -> Command {
    let all = Cli::command();
    let mut command = Command::new(NAME).version(env!("PROGRAM_VERSION"));
    if let Some(about) = all.get_about() {
        command = command.about(about.clone());
    }
    if let Some(examples) = all.get_after_help() {
        command = command.after_help(examples.clone());
    }
    let subcommands = all.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    command.subcommand_required(true).args(all.get_arguments().cloned()).subcommands(subcommands)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completions_offer_commands_and_options_and_nothing_that_is_hidden() {
        for shell in Shell::ALL {
            let text = String::from_utf8(completions(shell)).unwrap();
            for word in ["all-gather", "uninstall", "minbytes", "spark-untuned", "quiet"] {
                assert!(text.contains(word), "{shell:?}: {word}");
            }
            for word in ["communicators-rank", "nccl-tests-rank", "tune-collectives-write"] {
                assert!(!text.contains(word), "{shell:?}: {word}");
            }
        }
    }

    #[test]
    fn bash_completes_commands_options_and_values() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), completions(Shell::Bash)).unwrap();
        let complete = |words: [&str; 4], cword: usize| {
            let words_text = words.join(" ");
            let (current, before) = (words[cword], words[cword - 1]);
            let script = format!(
                "source {}; COMP_WORDS=({words_text}); COMP_CWORD={cword}; \
                 _nccl__spark nccl-spark \"{current}\" \"{before}\"; echo \"${{COMPREPLY[@]}}\"",
                file.path().display()
            );
            let output = std::process::Command::new("bash").args(["-c", &script]).output().unwrap();
            assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8(output.stdout).unwrap().trim().to_owned()
        };
        assert_eq!(complete(["nccl-spark", "all-g", "", ""], 1), "all-gather");
        assert_eq!(complete(["nccl-spark", "all-gather", "--minb", ""], 2), "--minbytes");
        assert_eq!(complete(["nccl-spark", "all-gather", "--fabric", "so"], 3), "soft");
        assert_eq!(complete(["nccl-spark", "fabric", "slow", "--fab"], 3), "--fabric-name");
    }

    #[test]
    fn every_command_has_a_page_with_its_options_and_examples() {
        let pages = pages().unwrap();
        let names: Vec<&str> = pages.iter().map(|(name, _)| name.as_str()).collect();
        for name in
            ["nccl-spark.1", "nccl-spark-all-gather.1", "nccl-spark-tune-collectives.1", "nccl-spark-fabric-slow.1"]
        {
            assert!(names.contains(&name), "{name}: {names:?}");
        }
        assert!(!names.iter().any(|name| name.contains("rank")), "{names:?}");
        assert_eq!(names.last(), Some(&"nccl-spark.1"));
        let text = |name: &str| {
            let page = pages.iter().find(|(found, _)| found == name).unwrap();
            String::from_utf8(page.1.clone()).unwrap()
        };
        let page = text("nccl-spark-all-gather.1");
        assert!(page.contains("\\-\\-minbytes") && page.contains(".SH EXAMPLES\n.nf\n"), "{page}");
        assert!(page.contains("\\&  nccl\\-spark all\\-gather"), "{page}");
        // Nothing changes from one build to the next.
        assert!(!page.contains("202"), "{page}");
    }
}
