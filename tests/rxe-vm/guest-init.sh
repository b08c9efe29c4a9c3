#!/bin/busybox sh
# shellcheck shell=dash
# The guest's process 1: loads the modules, mounts a tmpfs over the root folder, adds the shared
# folders, runs the command from boot.sh, and writes its exit status. If anything fails here, it
# writes text in place of a status.
/bin/busybox mkdir -p /sbin /usr/bin /usr/sbin
/bin/busybox --install -s

fail() {
  echo "guest-init: $*"
  echo "$*" >/run_share/status
  poweroff -f
}

# mount_copy_on_write TAG TARGET: mounts the host's folder TAG at TARGET; writes stay in the guest's
# memory.
mount_copy_on_write() {
  layers=/layers/$1
  mkdir -p "$layers" "$2"
  mount -t tmpfs tmpfs "$layers"
  mkdir "$layers/lower" "$layers/upper" "$layers/work"
  mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288,cache=loose,ro "$1" "$layers/lower" ||
    fail "cannot mount the host's folder $1"
  mount -t overlay -o "lowerdir=$layers/lower,upperdir=$layers/upper,workdir=$layers/work" overlay "$2" ||
    fail "cannot lay $1 over $2"
}

mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
hostname bed
ip link set lo up
failed=
for module in /modules/*; do insmod "$module" || failed="$failed $module"; done
mkdir /run_share
mount -t 9p -o trans=virtio,version=9p2000.L run /run_share || fail "cannot mount the run's folder"
[ -z "$failed" ] || fail "cannot load$failed"

mount_copy_on_write host /newroot
for folder in proc sys dev; do mount --move "/$folder" "/newroot/$folder"; done
mkdir -p /newroot/dev/shm /newroot/dev/pts
mount -t devpts devpts /newroot/dev/pts
for folder in dev/shm tmp run; do mount -t tmpfs tmpfs "/newroot/$folder"; done
chmod 1777 /newroot/tmp /newroot/dev/shm
# Links that udev makes on other systems.
ln -s /proc/self/fd /newroot/dev/fd
for stream in 0:stdin 1:stdout 2:stderr; do ln -s "/proc/self/fd/${stream%:*}" "/newroot/dev/${stream#*:}"; done
number=0
while read -r folder; do
  mount_copy_on_write "share$number" "/newroot$folder"
  number=$((number + 1))
done </run_share/shares
mkdir -p /newroot/run/bed
mount --bind /run_share /newroot/run/bed

chroot /newroot /bin/bash /run/bed/command
echo $? >/run_share/status
sync
poweroff -f
