# shellcheck shell=bash
# Sourced by the scripts on this machine that boot a guest: the cache of downloads and builds,
# Debian's packages, the list of test programs. These scripts have a function `die`.

# find_cache: sets $cache, the folder for downloads and builds.
find_cache() {
  cache=${SPARK_BED_CACHE:-${XDG_CACHE_HOME:-/var/tmp}/nccl-spark-bed-$(id -u)}
  mkdir -p "$cache"
  [[ -O $cache ]] || die "$cache belongs to another user; name another folder in SPARK_BED_CACHE"
}

# begin_build FOLDER: true if FOLDER is not marked as filled. FOLDER is then empty for the caller to
# fill, and no other script builds until end_build.
begin_build() {
  exec 9>"$cache/lock"
  flock -w 600 9 || die "another script has been building in $cache for ten minutes"
  if [[ -e $1/complete ]]; then
    exec 9>&-
    return 1
  fi
  rm -rf "$1" || die "cannot empty $1"
  mkdir -p "$1" || die "cannot make $1"
}

# end_build FOLDER: marks FOLDER as filled.
end_build() {
  touch "$1/complete"
  exec 9>&-
}

# use_archive ARCH: makes apt-get and apt-cache use packages of ARCH, from this machine's own
# archive. For another architecture than amd64 the lists are in a folder of the cache, and this
# machine's apt is not changed.
use_archive() {
  local folder=$cache/apt-$1
  if [[ $1 == amd64 ]]; then
    # apt's own lists may be older than the archive, which keeps only the newest kernel.
    [[ $(id -u) != 0 ]] || apt-get update -qq
    return
  fi
  mkdir -p "$folder"/{lists,cache/archives}/partial
  : >"$folder/status"
  cat >"$folder/apt.conf" <<END
APT::Architecture "$1";
APT::Architectures { "$1"; };
APT::Sandbox::User "$(id -un)";
Dir::State "$folder";
Dir::State::Status "$folder/status";
Dir::Cache "$folder/cache";
END
  export APT_CONFIG=$folder/apt.conf
  apt-get update -qq
}

# list_tests FILE: prints each test program in FILE, which has cargo's messages, one on each line. A
# line has the package's folder, a tab, and the program.
list_tests() {
  grep '"profile":{[^}]*"test":true}' "$1" |
    sed -n 's/.*"manifest_path":"\([^"]*\)\/Cargo\.toml".*"executable":"\([^"]*\)".*/\1\t\2/p'
}
