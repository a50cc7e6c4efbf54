# Runs in a guest with two disks, the second of which is read-only. A line with `==` begins the output of each part.
echo "== disks"
cat /sys/block/vda/size /sys/block/vdb/size
mkdir /mnt /second
mount -t ext4 /dev/vda /mnt
mount -t ext4 -o ro /dev/vdb /second
cat /mnt/name /second/name
echo "== read-only"
dd if=/dev/zero of=/dev/vdb bs=512 count=1
echo x >/second/new
mount -o remount,rw /second
umount /second
mount -t ext4 -o rw /dev/vdb /second
grep -o 'vdb .* r[ow]' /proc/mounts
echo "== sum"
head -c 1000000 /dev/urandom >/mnt/random
sha256sum /mnt/random
echo "== full"
dd if=/dev/zero of=/mnt/large bs=1M
status=$?
rm /mnt/large
umount /mnt
echo "== busy"
sleep 2
exit $status
